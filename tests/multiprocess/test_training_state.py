"""The training state of one layout goes on in another: weights exactly, moments and schedule within float noise."""

import pathlib
from typing import Any

import pytest
import torch

from rlframe.megatron.config import OptimizerConfig, TrainConfig
from rlframe.megatron.layout import Parallel
from rlframe.megatron.microbatch import split
from rlframe.models.config import ModelConfig
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Sum, merge
from tests.multiprocess.distributed import run_distributed
from tests.tiny_models import make

STEPS_BEFORE, STEPS_AFTER = 3, 3
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, schedule="cosine", warmup_steps=2)


class Likelihood:
    """Plain maximum likelihood."""

    def loss(self, policy: Any, batch: Sequences, weights: torch.Tensor) -> LossOutput:
        """-sum weights * logprob."""
        loss = -(weights * policy.logprobs).sum()
        return LossOutput(loss=loss, metrics={"train/loss": Sum(float(loss.detach()))})


def step_of(index: int) -> Sequences:
    """The sequences of optimizer step `index`: eight, of different lengths, different each step."""
    generator = torch.Generator().manual_seed(index)
    lengths = torch.randint(3, 20, (8,), generator=generator)
    total = int(lengths.sum())
    mask = torch.ones(total, dtype=torch.bool)
    mask[torch.cumsum(lengths, 0) - lengths] = False
    return Sequences(
        token_ids=torch.randint(0, 67, (total,), generator=generator), lengths=lengths, loss_mask=mask
    )  # fmt: skip


def on_rank(
    rank: int, init_method: str, model: str, layout: str, dtype: str, source: str | None, target: str | None
) -> dict[str, Any]:
    """Train from step `STEPS_BEFORE` of `source`, or from the start and save to `target` on the way."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    trainer = Trainer(TrainerSetup(
        rank=rank, init_method=init_method, device=device, model=ModelConfig(path=model),
        train=TrainConfig(parallel=layout, dtype=dtype, optimizer=OPTIMIZER),
        seed=0, temperature=1.0, total_optimizer_steps=STEPS_BEFORE + STEPS_AFTER, timeout_s=60, with_reference=True,
    ))  # fmt: skip
    names = list(trainer.layout.tensors)
    if source is None:
        train(trainer, layout, range(STEPS_BEFORE))
        trainer.save(pathlib.Path(str(target)))
    else:
        trainer.load(pathlib.Path(source), num_optimizer_steps=STEPS_BEFORE)
    return {
        "weights": trainer.export(names, torch.float32),
        "reference": trainer.logprobs(shares(layout, 0)[trainer.coordinates.dp_rank], reference=True),
        "losses": train(trainer, layout, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)),
        "trained": trainer.export(names, torch.float32),
        "reports": trainer.coordinates.reports,
    }


def shares(layout: str, index: int) -> list:
    """Micro-batches of optimizer step `index` by data-parallel rank."""
    batch = step_of(index)
    weights = batch.loss_mask.float() / int(batch.loss_mask.sum())
    return split(batch, weights, num_ranks=Parallel.parse(layout).dp, max_tokens=64)[0]


def train(trainer: Any, layout: str, steps: range) -> list[dict[str, Any]]:
    """This rank's share of the metrics of each step."""
    mine = [shares(layout, index)[trainer.coordinates.dp_rank] for index in steps]
    return trainer.train(mine, Likelihood(), first_step=steps.start)


def whole(results: list[dict[str, Any]], key: str, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for result in results:
        for name, pieces in result[key].items():
            matrix = tensors[name].view(-1, tensors[name].shape[-1])
            for (row, rows, col, cols), values in pieces:
                matrix[row : row + rows, col : col + cols] = values
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def losses(results: list[dict[str, Any]]) -> list[float]:
    """Loss of each optimizer step over all reporting ranks."""
    reporting = [result["losses"] for result in results if result["reports"]]
    return [merge(step)["train/loss"].value for step in zip(*reporting, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("model")
    make("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def shapes(model: pathlib.Path) -> dict[str, torch.Size]:
    from safetensors.torch import load_file

    return {name: tensor.shape for name, tensor in load_file(model / "model.safetensors").items()}


@pytest.fixture(scope="module")
def saved(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict[str, Any]]]:
    """A training state written at d2e2, and what its ranks did before and after."""
    folder = tmp_path_factory.mktemp("state")
    return folder, run_distributed(on_rank, 2, str(model), "d2e2", "float32", None, str(folder))


@pytest.mark.parametrize("layout", ["d2e2", "d1", "d1t2", "d1p2"])
def test_a_state_saved_at_d2e2_goes_on_in_another_layout(
    layout: str, model: pathlib.Path, shapes: dict[str, torch.Size], saved: tuple[pathlib.Path, list[dict[str, Any]]]
) -> None:
    folder, before = saved
    after = run_distributed(on_rank, Parallel.parse(layout).world, str(model), layout, "float32", str(folder), None)
    for name, tensor in whole(before, "weights", shapes).items():
        assert torch.equal(whole(after, "weights", shapes)[name], tensor), name
    # A lost moment, step count or place in the schedule moves weights by a good part of lr = 0.01 a step, and the
    # losses by parts in a hundred; another order of summation by parts in a million.
    tolerance = 0.0 if layout == "d2e2" else 1e-5
    assert losses(after) == pytest.approx(losses(before), rel=tolerance, abs=0)
    trained = whole(after, "trained", shapes)
    for name, tensor in whole(before, "trained", shapes).items():
        assert (trained[name] - tensor).abs().max() <= 10 * tolerance, name
    # The reference is the model the run began with, not the one it resumed.
    if layout == "d2e2":
        for mine, theirs in zip(after, before, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine["reference"], theirs["reference"], strict=True))


def test_bfloat16_training_goes_on_from_its_float32_main_weights(
    model: pathlib.Path, shapes: dict[str, torch.Size], tmp_path: pathlib.Path
) -> None:
    before = run_distributed(on_rank, 2, str(model), "d2e2", "bfloat16", None, str(tmp_path))
    after = run_distributed(on_rank, 2, str(model), "d2e2", "bfloat16", str(tmp_path), None)
    assert losses(after) == losses(before)
    for name, tensor in whole(before, "trained", shapes).items():
        assert torch.equal(whole(after, "trained", shapes)[name], tensor), name
