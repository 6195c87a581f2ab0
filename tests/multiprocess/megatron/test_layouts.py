"""Logits, loss gradients and exports do not depend on the layout, and equal those of transformers; and what each rank
holds is known without starting it."""

import pathlib
import re
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.options import ContextCommunication, ContextParallelConfig, KernelConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.models import shards
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config
from rlframe.tools.plan_sync import trainer_layouts
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Output
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.gradients.comparison import assemble
from tests.multiprocess.megatron.gradients.ranks import exported_gradients
from tests.tiny_models import MODELS, make, on_disk

LENGTHS = [5, 17, 2, 9, 30, 1, 12]
VARIANTS = ["kimi_k2", "glm4_moe_lite", "minimax_m2", "deepseek_v32", "glm_moe_dsa"]
"""Families made mostly of parts that others have, of which `make test` has few layouts and `make test-thorough` the
rest."""
EXPERTS = [
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v3_yarn",
    "gpt_oss",
    "llama4",
    "qwen3_next",
    *VARIANTS,
]
DENSE_VARIANTS = [
    "seed_oss", "mistral", "smollm3", "ministral3", "qwen3_yarn", "qwen2_linear", "olmo2", "olmo3", "exaone4",
    "gemma3", "llama4", "phi3", "granite",
]  # fmt: skip
"""The same, of which `make test` has one layout."""
SPARED = ("qwen3_5", "qwen3_5_moe")
"""Models of which FURTHER has most cells, because Qwen3-Next has all of their layers."""
EVERY = [name for name in MODELS if name not in SPARED]
DYNAMIC = " dynamic"
"""Behind a layout: sequences are whole on context-parallel ranks, however uneven that is."""
LAYOUTS = {
    "d1": EVERY,
    "d1t2": [*EVERY, "qwen3_5"],
    "d1p2": EVERY,
    "d2e2": EXPERTS,
    "d1c2": ["glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "gemma3", "olmo3", "ministral3", "granite"],
    "d1t2|ffn:d1t2": ["qwen3_moe", "glm4_moe", "llama4"],
    "d1t2p2|ffn:d1t1p2e2": ["deepseek_v3", "gpt_oss", "qwen3_next", *VARIANTS],
}
"""Each way in which a family's `load` cuts, for each family. All other layouts: test_gradient_matrix."""
FURTHER = [
    *((layout, name) for layout in ("d1", "d1t2", "d1p2", "d1c2") for name in SPARED),
    *((layout, "qwen3_5_moe") for layout in ("d2e2", "d1t2|ffn:d1t2", "d1t2p2|ffn:d1t1p2e2")),
    ("d1t2|ffn:d1t2", "qwen3_next"),
    ("d1c2p2", "gpt_oss"),
    *((f"d1c2{DYNAMIC}", name) for name in ("qwen3_next", "gpt_oss", "ministral3", "glm4_moe")),
]
"""Cells that only a thorough run has."""
PARTS = {
    "norms": "norm",
    "experts": r"experts\.|shared_expert[._]",
    "router": r"\.gate\.weight|router",
    "embedding": "embed_tokens",
    "head": "lm_head",
    "attention": "self_attn|linear_attn",
    "mlp": r"\.mlp\.|feed_forward",
}
"""Parts of a model by the names of Hugging Face, of which the first that matches counts."""
CASES = list(dict.fromkeys([*((layout, name) for layout, names in LAYOUTS.items() for name in names), *FURTHER]))
CHEAP = [("d1", name) for name in VARIANTS] + [("d1t2", "minimax_m2"), ("d1t2", "glm_moe_dsa")]
THOROUGH = [case for case in FURTHER if case != ("d1t2", "qwen3_5")]
THOROUGH += [case for case in CASES if case[1] in VARIANTS and case not in CHEAP]
ALONE = ("qwen3_yarn", "qwen2_linear", "mistral", "smollm3")
"""Variants of positions and of what a token sees, which are alike on every rank: their one layout has one."""
USUAL = [("d1" if name in ALONE else "d1t2", name) for name in DENSE_VARIANTS] + [("d1p2", "gemma3")]
THOROUGH += [case for case in CASES if case[1] in DENSE_VARIANTS and case not in USUAL]
THOROUGH += [("d1t2", "llama_scaled"), ("d1p2", "llama_scaled"), ("d1p2", "qwen2")]
# What two ranks load as transformers has it, one does.
THOROUGH += [("d1", name) for name in ("llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "mixtral", "glm4_moe")]
THOROUGH += [("d1", name) for name in ("deepseek_v3", "gpt_oss", "qwen3_next")]


def sequences() -> Sequences:
    """Seven sequences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    batch = Sequences(
        token_ids=torch.randint(0, 67, (total,), generator=generator),
        lengths=torch.tensor(LENGTHS),
        loss_mask=torch.rand(total, generator=generator) < 0.7,
    )
    batch.loss_mask[torch.cumsum(batch.lengths, 0) - batch.lengths] = False
    return batch


def weights_of(batch: Sequences) -> torch.Tensor:
    """Uneven token weights, so that a lost or doubled denominator shows."""
    return batch.loss_mask.float() * torch.linspace(0.5, 1.5, batch.num_tokens) / 10


def expected(model: Any, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Logprobs and entropies [2, T], gradients by Hugging Face name and their norm from transformers, one sequence at a
    time."""
    logprobs, entropies = [], []
    for row in batch.token_ids.split(LENGTHS):
        table = torch.log_softmax(model(row[None]).logits[0].float(), -1)
        predicted = table[:-1].gather(1, row[1:, None])[:, 0]
        logprobs.append(torch.cat([torch.zeros(1), predicted]))
        entropies.append(torch.cat([torch.zeros(1), -(table.exp() * table).sum(-1)[:-1]]))
    result = torch.cat(logprobs)
    (-(weights_of(batch) * result).sum()).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None
            continue
        gradients |= on_disk(name, parameter.grad, model.config.model_type)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    return torch.stack([result, torch.cat(entropies)]).detach(), gradients, norm


def on_rank(rank: int, init_method: str, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Logprobs, gradients and weights of one rank for each layout and model folder, with micro-batches of at most 40
    tokens."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.packed import context_parallel  # noqa: PLC0415
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    context_parallel.EVEN = 2.0
    results = []
    for index, (layout, folder) in enumerate(cases):
        setup = TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=device, model=ModelConfig(path=folder),
            train=TrainConfig(
                parallel=parsed(layout), dtype="float32", norms_every_steps=1,
                context_parallel=exchange(layout, folder),
                optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9),
            ),
            seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=False,
        )  # fmt: skip
        results.append(measure(Trainer(setup), layout))
        parallel.shutdown()
    return results


def exchange(layout: str, folder: str) -> ContextParallelConfig:
    """By heads where a model with sliding windows is split by context."""
    windows = parsed(layout).cp > 1 and read_config(pathlib.Path(folder)).get("sliding_window")
    communication = ContextCommunication.A2A if windows else ContextCommunication.P2P
    return ContextParallelConfig(communication=communication, dynamic=layout.endswith(DYNAMIC))


def parsed(layout: str) -> Parallel:
    """The layout itself."""
    return Parallel.parse(layout.removesuffix(DYNAMIC))


def measure(trainer: Any, layout: str) -> dict[str, Any]:
    """What one rank has to show for one model."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.model.transformer import transformer_config  # noqa: PLC0415

    batch = sequences()
    ranks, plan = split(batch, weights_of(batch), num_ranks=parsed(layout).dp, max_tokens=40)
    mine = ranks[trainer.coordinates.dp_rank].microbatches()
    measured = {
        "where": trainer.coordinates,
        "shards": trainer.model.shards,
        "shapes": {name: tuple(value.shape) for name, value in trainer.model.parameters.items()},
        "layout": trainer.layout,
        "plan": plan,
        "logprobs": trainer.logprobs(mine, reference=False),
        "entropies": trainer.entropies(mine),
        "weights": trainer.export(list(trainer.layout.tensors), torch.float32),
    }
    # What Megatron refuses on a GPU it refuses here already. Fused permutation alone asks for Transformer Engine.
    on_gpu = TrainConfig(parallel=parsed(layout), kernels=KernelConfig(permute_fusion=False))
    transformer_config(trainer.model.architecture, on_gpu, parsed(layout), torch.device("cuda"))
    forward.accumulate_gradients(trainer.model, mine, Weighted(), temperature=1.0)
    measured["gradients"] = exported_gradients(trainer)
    (update,) = trainer.train([mine], Weighted(), first_step=0)
    metrics = update.metrics
    measured["grad_norm"] = metrics["train/grad_norm"].value
    measured["by_part"] = {part: metrics[key].value for part in PARTS if (key := f"train/grad_norm_{part}") in metrics}
    return measured


class Weighted:
    """The simplest loss that shows every token's weight."""

    output = Output.TOKENS
    reads_renyi_entropy = False

    def loss(self, policy: Any, batch: Sequences, weights: torch.Tensor) -> LossOutput:
        """-sum weights * logprob."""
        return LossOutput(loss=-(weights * policy.logprobs).sum())


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """By layout and model: transformers' model, its folder, and what each rank has. Processes are started once for each
    number of ranks."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = [case for case in CASES if any(item.callspec.params["case"] == case for item in items)]
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS if any(name == case[1] for case in selected)}
    references = {name: make(name, folder) for name, folder in folders.items()}
    found = {}
    for world in sorted({parsed(layout).world for layout, _ in selected}):
        cases = [case for case in selected if parsed(case[0]).world == world]
        # Some hundred trainers, one after the other: minutes on a machine that is slow or has other work.
        ranks = run_distributed(on_rank, world, [(layout, str(folders[name])) for layout, name in cases], timeout_s=900)
        for index, case in enumerate(cases):
            found[case] = references[case[1]], folders[case[1]], [rank[index] for rank in ranks]
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] if case in THOROUGH else []) for case in CASES],
    ids=" ".join,
)
def test_a_layout_equals_transformers_in_logprobs_gradients_and_export(
    case: tuple[str, str], results: dict[tuple[str, str], Any]
) -> None:
    (layout, name), (reference, folder, ranks) = case, results[case]
    reference.zero_grad()
    check(name, reference, load_file(folder / "model.safetensors"), ranks)
    check_foreseen(folder, parsed(layout), ranks)


def check(name: str, reference: Any, disk: dict[str, torch.Tensor], results: list[dict[str, Any]]) -> None:
    """One model's results of all ranks against transformers and the checkpoint."""
    batch = sequences()
    of_tokens, gradients, norm = expected(reference, batch)
    reporting = sorted((r for r in results if r["where"].reports), key=lambda r: r["where"].dp_rank)
    for what, values in zip(("logprobs", "entropies"), of_tokens, strict=True):
        ours = join([r[what] for r in reporting], reporting[0]["plan"], batch.lengths)
        torch.testing.assert_close(
            ours, values * batch.loss_mask, atol=1e-4, rtol=0, msg=lambda text, what=what: f"{name}, {what}: {text}"
        )

    exported = assemble(results, "weights", {key: value.shape for key, value in disk.items()})
    for key, value in disk.items():
        assert torch.equal(exported[key], value), f"{name}: {key}"

    summed = assemble(results, "gradients", {key: value.shape for key, value in gradients.items()})
    for key, value in gradients.items():
        torch.testing.assert_close(
            summed[key], value, atol=2e-5, rtol=1e-3, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )
    for result in results:
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-4), f"{name}: {result['where']}"
        assert result["by_part"] == pytest.approx(norms_by_part(gradients), rel=1e-3), f"{name}: {result['where']}"


def norms_by_part(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the gradient's norm by part of the model, from tensors by their Hugging Face names."""
    squares: dict[str, float] = {}
    for key, value in gradients.items():
        part = next(part for part, pattern in PARTS.items() if re.search(pattern, key))
        squares[part] = squares.get(part, 0.0) + float(value.double().square().sum())
    return {part: square**0.5 for part, square in squares.items()}


def check_foreseen(folder: pathlib.Path, parallel: Parallel, results: list[dict[str, Any]]) -> None:
    """What is said of the ranks without Megatron against what Megatron's ranks said of themselves."""
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    layouts = trainer_layouts(family, architecture, parallel, dtype=torch.float32)
    assert sorted(result["where"].rank for result in results) == list(range(parallel.world))
    for result in results:
        rank = result["where"].rank
        foreseen = shards.shards_of_rank(architecture, rank, **asdict(parallel))
        assert foreseen == result["shards"], f"{folder.name}, rank {rank}"
        assert shards.parameters(family, architecture, foreseen) == result["shapes"], f"{folder.name}, rank {rank}"
        assert layouts[rank] == result["layout"], f"{folder.name}, rank {rank}"
