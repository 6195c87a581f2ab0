"""A reference that follows the policy: what it becomes on every layout, and that a state has it, for any layout."""

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.algorithms.reference import ReferenceUpdateConfig
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.options import MoeConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from tests.multiprocess.checkpoint.test_training_state import shares, train, whole
from tests.multiprocess.distributed import run_distributed, save
from tests.tiny_models import make

UPDATE = ReferenceUpdateConfig(every_steps=2, mix=0.3)
SAVED_AFTER, STEPS = 3, 4
CASES = {
    ("qwen3_moe", "float32", "d2e2"): ["d2e2", "d1t2", "d1p2"],
    ("qwen3_moe", "bfloat16", "d2e2"): ["d1t2"],
    # Both stages hold the embedding, in a buffer of its own.
    ("qwen3_tied", "float32", "d1p2"): ["d1"],
    # The routers' biases are moved too, and are no parameters.
    ("glm4_moe", "float32", "d2e2"): ["d2e2"],
}
"""Where a state is saved, and where it is resumed: (model, dtype, layout) -> layouts."""


def on_rank(rank: int, init_method: str, folder: pathlib.Path) -> dict[tuple, list[dict[str, Any] | None]]:
    """What this rank saw of every case, as in test_training_state."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    results: dict[tuple, list[dict[str, Any] | None]] = {}
    for case, targets in CASES.items():
        source = case[2]
        results[case] = [
            visit(rank, f"{init_method}-{'-'.join(case)}-{index}", folder, case, layout, index == 0)
            if rank < Parallel.parse(layout).world
            else None
            for index, layout in enumerate([source, *targets])
        ]
    return results


def visit(
    rank: int, init_method: str, folder: pathlib.Path, case: tuple[str, str, str], layout: str, is_first: bool
) -> dict[str, Any]:
    """Trains from the start and saves on the way, or goes on from what was saved."""
    from rlframe.megatron.worker import parallel  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    model, dtype, _ = case
    state = folder / "-".join(case)
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant")
    moe = MoeConfig(bias_update_rate=0.01 if model == "glm4_moe" else 0.0)
    trainer = Trainer(TrainerSetup(
        rank=rank, init_method=init_method, device=torch.device("cpu"), model=ModelConfig(path=str(folder / model)),
        train=TrainConfig(parallel=layout, dtype=dtype, optimizer=optimizer, moe=moe), seed=0, temperature=1.0,
        total_optimizer_steps=STEPS, timeout_s=60, with_reference=True, reference_update=UPDATE,
    ))  # fmt: skip
    seen: dict[str, Any] = {"first": pieces(trainer)}
    if is_first:
        for index in range(SAVED_AFTER):
            seen[f"frozen {index}"] = pieces(trainer)
            train(trainer, layout, range(index, index + 1))
            seen[f"policy {index}"] = pieces(trainer, reference=False)
        state.mkdir(exist_ok=True)
        trainer.stage(state, copy=True)
    else:
        trainer.load(state, num_optimizer_steps=SAVED_AFTER)
    seen["saved"] = pieces(trainer)
    train(trainer, layout, range(SAVED_AFTER, STEPS))
    seen["moved"] = pieces(trainer)
    seen["logprobs"] = trainer.logprobs(shares(layout, 0)[trainer.coordinates.dp_rank], reference=True)
    if is_first:
        written = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(written, trainer.write())
        trainer.complete(written)
        torch.distributed.barrier()
    elif moe.bias_update_rate:
        seen["older"] = load_without_biases(trainer, folder / "older")
    parallel.shutdown()
    return seen


def load_without_biases(trainer: Any, folder: pathlib.Path) -> bool:
    """Loads a state as older releases wrote it, whose references had no biases. Returns whether those of the present
    one are as they were."""
    from rlframe.megatron.memory.reference import ReferenceWeights  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.model.model import parameter_buffers, routing_biases  # noqa: PLC0415

    present, biases = trainer.reference, routing_biases(trainer.model)
    before = [present.exact_of(bias).clone() for bias in biases]
    trainer.reference = ReferenceWeights(parameter_buffers(trainer.model), follows=True)
    folder.mkdir(exist_ok=True)
    save(trainer, folder)
    trainer.reference = present
    trainer.load(folder, num_optimizer_steps=SAVED_AFTER)
    return bool(biases) and all(
        torch.equal(present.exact_of(bias), kept) for bias, kept in zip(biases, before, strict=True)
    )


def pieces(trainer: Any, *, reference: bool = True) -> dict[str, list]:
    """This rank's float32 pieces of the reference, or of the policy, by Hugging Face name."""
    parameters = trainer.model.parameters
    values = {name: trainer.reference.exact_of(each) if reference else each for name, each in parameters.items()}
    return {
        name: [(tuple(box.region), box.view(values).float().clone()) for box in boxes if box.parameter in values]
        for name, boxes in trainer.layout.boxes.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The models and, after `results`, the saved states."""
    folder = tmp_path_factory.mktemp("references")
    for model in {model for model, *_ in CASES}:
        make(model, folder / model, num_hidden_layers=4 if model == "qwen3_tied" else 2)
    return folder


@pytest.fixture(scope="module")
def results(folder: pathlib.Path) -> dict[tuple, list[list[dict[str, Any]]]]:
    """By case, by layout: what each rank of it saw."""
    ranks = run_distributed(on_rank, 2, folder)
    return {
        case: [[seen for rank in ranks if (seen := rank[case][index]) is not None] for index in range(len(targets) + 1)]
        for case, targets in CASES.items()
    }


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_following_reference_is_mixed_saved_and_resumed(
    case: tuple[str, str, str], folder: pathlib.Path, results: dict[tuple, list[list[dict[str, Any]]]]
) -> None:
    shapes = {name: tensor.shape for name, tensor in load_file(folder / case[0] / "model.safetensors").items()}
    before, *others = results[case]

    def seen(name: str, ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return whole([rank[name] for rank in ranks], shapes)

    first, policy, saved, moved = (seen(name, before) for name in ("first", "policy 1", "saved", "moved"))
    frozen = seen("frozen 1", before)
    for name in shapes:
        # It moves after the second step and the fourth, to the bit in float32 whatever the dtype of the weights.
        assert torch.equal(frozen[name], first[name])
        assert torch.equal(saved[name], first[name].mul(0.7).add(policy[name], alpha=0.3)), name
    assert not torch.equal(saved["model.norm.weight"], first["model.norm.weight"])
    assert not torch.equal(moved["model.norm.weight"], saved["model.norm.weight"])
    for layout, after in zip(CASES[case], others, strict=True):
        loaded, resumed = seen("saved", after), seen("moved", after)
        assert all(rank.get("older", True) for rank in after)
        assert [name for name in shapes if not torch.equal(loaded[name], saved[name])] == [], layout
        if layout == case[2]:
            assert [name for name in shapes if not torch.equal(resumed[name], moved[name])] == []
            for mine, theirs in zip(after, before, strict=True):
                assert all(torch.equal(*pair) for pair in zip(mine["logprobs"], theirs["logprobs"], strict=True))
        elif case[1] == "float32":
            # Adam turns another order of summation into steps of another sign where a gradient is about zero.
            assert max(float((resumed[name] - moved[name]).abs().max()) for name in shapes) < 1e-3, layout
