"""Steps of Muon equal those of the published rule, written here from the papers, under every layout."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlframe.megatron.config.optimizer import MuonConfig, OptimizerConfig
from rlframe.megatron.config.options import CommunicationConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.gradients.comparison import assemble
from tests.multiprocess.megatron.test_layouts import Weighted
from tests.multiprocess.megatron.training.test_updates import norm, part
from tests.tiny_models import make, on_disk

OPTIMIZER = {
    "name": "muon", "lr": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "clip_grad": 0.05,
}  # fmt: skip
MOMENTUM = 0.8
STEPS = 2
MATRIX = re.compile(r"(q|k|v|o|gate|up|down|q_a|q_b|kv_a|kv_b)_proj(_with_mqa)?\.weight$|\.w[123]\.weight$")
"""The matrices of attention, MLPs and experts: not the embedding, the output layer and the router (`mlp.gate`)."""
OVERLAPPED = CommunicationConfig(overlap_grad_reduce=True, overlap_param_gather=True, bucket_parameters=10_000)
CASES = [
    ("qwen3_moe", ["d1t2", "d2e2"]),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ("qwen3", ["d1c2", "d1p2v2"]),
        ("qwen3_moe", ["d1", "d2", "d1p2", "d2 overlapped", "d2 asleep"]),
        ("qwen3_moe", ["d1t2|ffn:d1t2", "d1t2|ffn:d2", "d2t2|ffn:d1t2e2"]),
        ("qwen3_tied", ["d2t2p2"]),
        # Every tensor-parallel rank holds the first projections of latent attention whole.
        ("deepseek_v3", ["d1t2", "d2e2"]),
        ("deepseek_v3_yarn", ["d1t2"]),
        ("glm4_moe", ["d1t2"]),
        ("mixtral", ["d1t2"]),
        # One tensor of the checkpoint holds gate and up of all experts, turned, in rows that alternate.
        ("gpt_oss", ["d1", "d2", "d1t2", "d2e2"]),
    ]),
]  # fmt: skip


def on_rank(rank: int, init_method: str, folder: str, layouts: list[str]) -> list[dict[str, Any] | None]:
    """Takes the steps under each layout, and returns this rank's weights and the norms. None where it has no part."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    return [
        steps(rank, f"{init_method}-{index}", folder, *layout.split()) if rank < world(layout) else None
        for index, layout in enumerate(layouts)
    ]


def world(layout: str) -> int:
    """Returns the number of ranks of a layout, behind which may stand how the steps are taken."""
    return Parallel.parse(layout.split()[0]).world


def steps(rank: int, init_method: str, folder: str, layout: str, how: str = "") -> dict[str, Any]:
    """Takes the steps under one layout."""
    from rlframe.megatron.worker import parallel  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    optimizer = OptimizerConfig(**OPTIMIZER, muon=MuonConfig(momentum=MOMENTUM))
    setup = TrainerSetup(
        rank=rank, init_method=init_method, device=torch.device("cpu"), model=ModelConfig(path=folder),
        train=TrainConfig(
            parallel=layout, dtype="float32", optimizer=optimizer, norms_every_steps=1, num_minibatches=STEPS,
            offload_optimizer=how == "asleep",
            communication=OVERLAPPED if how == "overlapped" else CommunicationConfig(),
        ),
        seed=0, temperature=1.0, total_optimizer_steps=STEPS, timeout_s=60, with_reference=False,
    )  # fmt: skip
    trainer = Trainer(setup)
    ranks, mine = Parallel.parse(layout).dp, trainer.coordinates.dp_rank
    batches = [split(*part(step), num_ranks=ranks, max_tokens=40)[0][mine].microbatches() for step in range(STEPS)]
    if how == "asleep":
        updates = []
        for index, batch in enumerate(batches):
            trainer.sleep()
            trainer.wake()
            updates += trainer.train([batch], Weighted(), first_step=index)
    else:
        updates = trainer.train(batches, Weighted(), first_step=0)
    found = {
        "weights": trainer.export(list(trainer.layout.tensors), torch.float32),
        "norms": [each.metrics["train/grad_norm"].value for each in updates],
        "ratios": [each.metrics["train/update_ratio"].value for each in updates],
    }
    parallel.shutdown()
    return found


def orthogonalized(gradient: torch.Tensor) -> torch.Tensor:
    """Returns `newtonschulz5` of https://kellerjordan.github.io/posts/muon/, in float32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / (gradient.norm() + 1e-7)
    if gradient.size(0) > gradient.size(1):
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if gradient.size(0) > gradient.size(1) else x


def matrices(name: str, value: torch.Tensor, kind: str) -> Iterator[torch.Tensor]:
    """Yields views of the matrices in one of transformers' parameters or gradients."""
    if kind == "gpt_oss" and name.endswith("experts.gate_up_proj"):
        yield from (half for expert in value for half in (expert[:, 0::2], expert[:, 1::2]))
    elif kind == "gpt_oss" and name.endswith("experts.down_proj"):
        yield from value
    else:
        yield from (each for key, each in on_disk(name, value, kind).items() if MATRIX.search(key))


def by_the_papers(model: Any) -> tuple[list[float], list[float]]:
    """Takes the same steps: Muon as in equations 1 and 4 of arXiv 2502.16982, with Nesterov's momentum, and torch's
    AdamW for all else. Returns the gradient norms before clipping, and the norms of the updates over those of the
    weights."""
    kind = model.config.model_type
    named = dict(model.named_parameters())
    by_muon = {name for name, value in named.items() if any(True for _ in matrices(name, value.detach(), kind))}
    rest = {name: value for name, value in named.items() if name not in by_muon}
    exempt = {name for name, value in rest.items() if value.dim() == 1 or name.endswith("bias")}
    adamw = torch.optim.AdamW(
        [{"params": [rest[name] for name in rest if name not in exempt]},
         {"params": [rest[name] for name in exempt], "weight_decay": 0.0}],
        lr=OPTIMIZER["lr"], weight_decay=OPTIMIZER["weight_decay"], eps=OPTIMIZER["eps"],
        betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
    )  # fmt: skip
    momentum = {name: torch.zeros_like(named[name]) for name in by_muon}
    norms, ratios = [], []
    for step in range(STEPS):
        chosen, weights = part(step)
        model.zero_grad()
        lengths = chosen.lengths.tolist()
        for row, weight in zip(chosen.token_ids.split(lengths), weights.split(lengths), strict=True):
            table = torch.log_softmax(model(row[None]).logits[0].float(), -1)
            (-(weight[1:] * table[:-1].gather(1, row[1:, None])[:, 0]).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])))
        before = {name: value.detach().clone() for name, value in named.items()}
        adamw.step()
        with torch.no_grad():
            for name in by_muon:
                gradient = named[name].grad
                momentum[name].mul_(MOMENTUM).add_(gradient)
                ahead = gradient + MOMENTUM * momentum[name]
                for weight, direction in zip(
                    matrices(name, named[name], kind), matrices(name, ahead, kind), strict=True
                ):
                    update = 0.2 * max(weight.shape) ** 0.5 * orthogonalized(direction)
                    weight.sub_(OPTIMIZER["lr"] * (update + OPTIMIZER["weight_decay"] * weight))
        ratios.append(norm(named[name] - before[name] for name in named) / norm(named.values()))
    return norms, ratios


@pytest.mark.parametrize(("name", "layouts"), CASES)
def test_steps_of_muon_are_those_of_the_papers(tmp_path: pathlib.Path, name: str, layouts: list[str]) -> None:
    model = make(name, tmp_path, num_hidden_layers=4 if name in ("qwen3", "qwen3_tied") else 2)
    kind = model.config.model_type
    before = named_on_disk(model, kind)
    found = run_distributed(on_rank, max(map(world, layouts)), str(tmp_path), layouts)
    norms, ratios = by_the_papers(model)
    assert min(norms) > 2 * OPTIMIZER["clip_grad"], "every step is clipped"
    expected = named_on_disk(model, kind)
    for index, layout in enumerate(layouts):
        ranks = [rank[index] for rank in found if rank[index]]
        ours = assemble(ranks, "weights", {key: value.shape for key, value in expected.items()})
        errors = {key: norm([ours[key] - value]) / norm([value - before[key]]) for key, value in expected.items()}
        assert {key: error for key, error in errors.items() if error > 2e-3} == {}, f"{layout}: parts that are off"
        for rank in ranks:
            assert rank["norms"] == pytest.approx(norms, rel=1e-4), layout
            assert rank["ratios"] == pytest.approx(ratios, rel=1e-3), layout


def named_on_disk(model: Any, kind: str) -> dict[str, torch.Tensor]:
    """Returns a copy of the weights by the checkpoint's names."""
    return {
        key: value
        for name, parameter in model.named_parameters()
        for key, value in on_disk(name, parameter.detach().clone(), kind).items()
    }
