"""A head of C outputs, or none, in the place of the vocabulary's: values, states and every gradient are those of
transformers in any layout; what is exported is one of its models, and what is saved goes on in another layout."""

import pathlib
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Recompute, TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.config import HEAD, ModelConfig
from rlframe.ops.sequences import last_tokens
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Output
from tests.multiprocess.distributed import run_distributed, save
from tests.multiprocess.megatron.gradients.comparison import assemble
from tests.multiprocess.megatron.gradients.ranks import exported_gradients
from tests.multiprocess.megatron.test_layouts import LENGTHS, sequences, weights_of
from tests.tiny_models import make, on_disk

C = 3
MODELS = {"dense": "qwen3", "moe": "qwen3_moe"}
"""The second one's embedding is its output layer too, as a language model."""
CASES = [
    ("t2", "dense", C),
    ("p2", "dense", 0),
    ("d2e2", "moe", C),
    ("t2p2v2", "moe", C),
    ("t2c2", "moe", C),
    ("t2c2", "moe", 0),
]
"""Layout, model, and outputs of its head."""
SAVED, RESUMED = "t2p2", ("d2",)
"""Where a state is saved, and where it goes on."""


class OfValues:
    """sum over tokens of w (v_0^2 + 2 v_1^2 + 3 v_2^2 + v_0)."""

    output = Output.VALUES

    def loss(self, policy: Any, batch: Sequences, weights: torch.Tensor) -> LossOutput:
        """See the class."""
        values = policy.values
        return LossOutput(loss=(weights * (values.square() @ torch.tensor([1.0, 2.0, 3.0]) + values[:, 0])).sum())


class OfStates:
    """sum over tokens of w (sum over H of tanh s)."""

    output = Output.STATES

    def loss(self, policy: Any, batch: Sequences, weights: torch.Tensor) -> LossOutput:
        """See the class."""
        return LossOutput(loss=(weights * policy.states.tanh().sum(1)).sum())


def loss_of(outputs: int) -> Any:
    """The loss for a head of so many outputs."""
    return OfValues() if outputs else OfStates()


# What a rank does


def on_rank(rank: int, init_method: str, folder: pathlib.Path) -> dict[str, Any]:
    """What this rank measured of every case, of the checkpoints, and of adapters; None where it has no part."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    measured = [
        visit(rank, f"{init_method}{index}", folder, *case, measure, recompute=index % 2 == 1)
        for index, case in enumerate(CASES)
    ]
    state, language = folder / "state", folder / "language"
    for each in (state, language):
        each.mkdir(exist_ok=True)
    saved = visit(rank, f"{init_method}s", folder, SAVED, "moe", C, lambda trainer: train_and_save(trainer, state))
    if rank == 0:
        visit(rank, f"{init_method}l", folder, "d1", "dense", None, lambda trainer: save_weights(trainer, language))
    return {
        "cases": measured,
        "saved": saved,
        "resumed": [
            visit(rank, f"{init_method}r{layout}", folder, layout, "moe", C, lambda trainer: resume(trainer, state))
            for layout in RESUMED
        ],
        "from_language": visit(
            rank, f"{init_method}f", folder, "p2", "dense", C, lambda trainer: start_from(trainer, language)
        ),
        "adapters": visit(rank, f"{init_method}a", folder, "t2", "dense", C, train_adapters, lora=LoraConfig(rank=2)),
    }


def visit(
    rank: int,
    rendezvous: str,
    folder: pathlib.Path,
    layout: str,
    model: str,
    outputs: int | None,
    what: Any,
    *,
    recompute: bool = False,
    lora: LoraConfig | None = None,
) -> Any:
    """What `what` gives for a trainer; None on ranks that the layout does not have."""
    from rlframe.megatron.worker import parallel  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    if rank >= Parallel.parse(layout).world:
        return None
    trainer = Trainer(TrainerSetup(
        rank=rank, init_method=rendezvous, device=torch.device("cpu"), model=ModelConfig(path=str(folder / model)),
        train=TrainConfig(
            parallel=layout, dtype="float32", optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9), lora=lora,
            recompute=Recompute.FULL if recompute else Recompute.NONE,
        ),
        seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=False, num_outputs=outputs,
    ))  # fmt: skip
    result = what(trainer)
    parallel.shutdown()
    return result


def share(trainer: Any) -> tuple[list, list]:
    """This rank's micro-batches, and the plan of all."""
    batch = sequences()
    dp = Parallel.parse(trainer.setup.train.parallel).dp
    ranks, plan = split(batch, weights_of(batch), num_ranks=dp, max_tokens=40)
    return ranks[trainer.coordinates.dp_rank].microbatches(), plan


def found(trainer: Any) -> dict[str, Any]:
    """The outputs of this rank's sequences and all it holds."""
    mine, plan = share(trainer)
    return {
        "where": trainer.coordinates,
        "plan": plan,
        "outputs": trainer.outputs(mine),
        "weights": trainer.export(list(trainer.layout.tensors), torch.float32),
    }


def measure(trainer: Any) -> dict[str, Any]:
    """Outputs, gradients, their norm and weights."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see on_rank

    (mine, _), loss, before = share(trainer), loss_of(trainer.setup.num_outputs), found(trainer)
    forward.accumulate_gradients(trainer.model, mine, loss, temperature=1.0)
    gradients = exported_gradients(trainer)
    norm = trainer.train([mine], loss, first_step=0)[0].metrics["train/grad_norm"].value
    return before | {"gradients": gradients, "grad_norm": norm}


def train_and_save(trainer: Any, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Outputs after one step, which is saved, and after another."""
    trainer.train([share(trainer)[0]], OfValues(), first_step=0)
    save(trainer, folder)
    return after_another_step(trainer)


def resume(trainer: Any, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Outputs after loading, and after another step."""
    trainer.load(folder, num_optimizer_steps=1)
    return after_another_step(trainer)


def after_another_step(trainer: Any) -> list[dict[str, Any]]:
    """Outputs now and after the second step."""
    before = found(trainer)
    trainer.train([share(trainer)[0]], OfValues(), first_step=1)
    return [before, found(trainer)]


def save_weights(trainer: Any, folder: pathlib.Path) -> None:
    """Writes the weights only, from one rank."""
    from rlframe.megatron.checkpoint import files  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.checkpoint import state as checkpoint  # noqa: PLC0415

    staged = checkpoint.stage(trainer.model, None, folder, copy_to=None)
    checkpoint.complete(staged, [files.write(staged, read_back=0.0)])


def start_from(trainer: Any, folder: pathlib.Path) -> dict[str, Any]:
    """What there is after the weights of a language model were loaded over others."""
    with torch.no_grad():
        for parameter in trainer.model.parameters.values():
            parameter.mul_(0.5)
    trainer.load_weights(folder)
    return found(trainer)


def train_adapters(trainer: Any) -> list[dict[str, Any]]:
    """What there is before and after a step with adapters, and the names of what is trained."""
    before = found(trainer)
    trainer.train([share(trainer)[0]], OfValues(), first_step=0)
    return [before, found(trainer) | {"trained": sorted(trainer.adapter_tensors())}]


# What transformers has


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The models, each with a head of C outputs in its file besides the language model's."""
    root = tmp_path_factory.mktemp("heads")
    for model, name in MODELS.items():
        whole = make(name, root / model, num_hidden_layers=4).state_dict()
        scored = transformers.AutoModelForSequenceClassification.from_pretrained(root / model, num_labels=C)
        scored.save_pretrained(root / model)
        file = load_file(root / model / "model.safetensors") | {"lm_head.weight": whole["lm_head.weight"].clone()}
        write_checkpoint(root / model, file.items())
    return root


@pytest.fixture(scope="module")
def references(folder: pathlib.Path) -> dict[str, Any]:
    """transformers' own models."""
    kind = transformers.AutoModelForSequenceClassification
    return {model: kind.from_pretrained(folder / model, num_labels=C).eval() for model in MODELS}


@pytest.fixture(scope="module")
def results(folder: pathlib.Path) -> list[dict[str, Any]]:
    """By rank."""
    return run_distributed(on_rank, 4, folder)


def expected(reference: Any, outputs: int) -> torch.Tensor:
    """[T, C] values or [T, H] states, one sequence at a time."""
    states = [reference.model(row[None]).last_hidden_state[0] for row in sequences().token_ids.split(LENGTHS)]
    return reference.score(torch.cat(states)) if outputs else torch.cat(states)


def outputs_of(ranks: list[dict[str, Any]], outputs: int) -> torch.Tensor:
    """What all ranks have together, in the batch's order."""
    reporting = sorted((rank for rank in ranks if rank["where"].reports), key=lambda rank: rank["where"].dp_rank)
    lengths = sequences().lengths if outputs else torch.ones(len(LENGTHS), dtype=torch.int64)
    return join([rank["outputs"] for rank in reporting], reporting[0]["plan"], lengths)


def of_ranks(results: list[dict[str, Any]], key: str, index: int | None = None) -> list[Any]:
    """What each rank that took part has under `key`."""
    entries = [rank[key] if index is None else rank[key][index] for rank in results]
    return [entry for entry in entries if entry is not None]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: " ".join(map(str, CASES[index])))
def test_outputs_and_gradients_are_those_of_transformers(
    index: int, folder: pathlib.Path, references: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    (_, model, outputs), ranks = CASES[index], of_ranks(results, "cases", index)
    batch, reference = sequences(), references[model]
    reference.zero_grad()
    read = expected(reference, outputs)
    wanted = read if outputs else read[last_tokens(batch)]
    torch.testing.assert_close(outputs_of(ranks, outputs), wanted.detach(), atol=1e-5, rtol=1e-4)

    policy = type("Read", (), {"values": read, "states": read})
    loss_of(outputs).loss(policy, batch, weights_of(batch)).loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            gradients |= on_disk(name, parameter.grad)
    assert (HEAD in gradients) == bool(outputs) and "model.embed_tokens.weight" in gradients
    summed = assemble(ranks, "gradients", {name: value.shape for name, value in gradients.items()})
    for name, value in gradients.items():
        bound = 5e-5 * max(float(value.abs().max()), 1e-3 * max(float(each.abs().max()) for each in gradients.values()))
        assert float((summed[name] - value).abs().max()) < bound, name
    assert set().union(*(rank["gradients"] for rank in ranks)) == set(gradients)
    norm = sum(float(value.square().sum()) for value in gradients.values()) ** 0.5
    assert [rank["grad_norm"] for rank in ranks] == pytest.approx([norm] * len(ranks), rel=1e-4)


@pytest.mark.parametrize("outputs", [C, 0])
def test_an_export_is_one_of_transformers_models(
    outputs: int, folder: pathlib.Path, results: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    index = CASES.index(("t2c2", "moe", outputs))
    ranks, disk = of_ranks(results, "cases", index), load_file(folder / "moe" / "model.safetensors")
    shapes = {name: disk[name].shape for name in ranks[0]["weights"]}
    assert (HEAD in shapes) == bool(outputs) and "lm_head.weight" not in shapes
    exported = assemble(ranks, "weights", shapes)
    assert [name for name, value in exported.items() if not torch.equal(value, disk[name])] == []
    write_checkpoint(tmp_path, exported.items())
    copy_sidecars(folder / "moe", tmp_path, dtype=torch.float32, num_outputs=outputs)

    ours = outputs_of(ranks, outputs)
    # By the class that config.json names, with no argument.
    (name,) = transformers.AutoConfig.from_pretrained(tmp_path).architectures
    assert name == ("Qwen3MoeForSequenceClassification" if outputs else "Qwen3MoeModel")
    kind = transformers.AutoModelForSequenceClassification if outputs else transformers.AutoModel
    model, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(model).__name__ == name
    rows = [row[None] for row in sequences().token_ids.split(LENGTHS)]
    with torch.no_grad():
        found = [model(row).logits[0] if outputs else model(row).last_hidden_state[0, -1] for row in rows]
    ends = torch.cumsum(sequences().lengths, 0) - 1
    in_loss = last_tokens(sequences()) == ends
    wanted = ours[ends] if outputs else ours
    keep = torch.ones_like(in_loss) if outputs else in_loss
    assert keep.sum() >= 3
    torch.testing.assert_close(torch.stack(found)[keep], wanted[keep], atol=1e-5, rtol=1e-4)


def test_a_saved_head_goes_on_in_another_layout(results: list[dict[str, Any]]) -> None:
    saved = of_ranks(results, "saved")
    first, second = ([rank[when] for rank in saved] for when in (0, 1))
    assert not torch.allclose(outputs_of(first, C), outputs_of(second, C), atol=1e-3)
    for index in range(len(RESUMED)):
        resumed = of_ranks(results, "resumed", index)
        for when, before in ((0, first), (1, second)):
            after = [rank[when] for rank in resumed]
            torch.testing.assert_close(outputs_of(after, C), outputs_of(before, C), atol=2e-5, rtol=1e-4)


def test_a_head_keeps_its_values_where_a_language_models_weights_are_loaded(
    folder: pathlib.Path, results: list[dict[str, Any]]
) -> None:
    disk = load_file(folder / "dense" / "model.safetensors")
    loaded = assemble(
        of_ranks(results, "from_language"),
        "weights",
        {name: value.shape for name, value in disk.items() if name != "lm_head.weight"},
    )
    for name, value in loaded.items():
        assert torch.equal(value, disk[name] * (0.5 if name == HEAD else 1.0)), name


def test_a_head_is_trained_in_full_beside_adapters(folder: pathlib.Path, results: list[dict[str, Any]]) -> None:
    disk = load_file(folder / "dense" / "model.safetensors")
    ranks = of_ranks(results, "adapters")
    before, after = (
        assemble([rank[when] for rank in ranks], "weights", {HEAD: disk[HEAD].shape})[HEAD] for when in (0, 1)
    )
    assert torch.equal(before, disk[HEAD]) and ((after - before).abs() > 5e-4).all()
    trained = ranks[0][1]["trained"]
    assert f"base_model.model.{HEAD}" in trained and not any("score.lora" in name for name in trained)
