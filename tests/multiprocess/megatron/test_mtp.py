"""The head for multi-token prediction: its loss and gradients equal those of transformers' layers under every layout,
it is exported bit for bit, and the layers below do not know of it."""

import pathlib
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.megatron.config.mtp import MtpConfig, MtpMode
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.options import Recompute, RecomputeConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.models.config import ModelConfig
from rlframe.types.results import merge
from tests.mtp_models import NAMES, Reference, make_with_mtp
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.gradients.comparison import assemble
from tests.multiprocess.megatron.gradients.ranks import exported_gradients
from tests.multiprocess.megatron.test_layouts import LENGTHS, Weighted, expected, sequences, weights_of

FACTOR = 0.3
CHEAP = [("d1", "deepseek_v3"), ("d1t2", "qwen3_next"), ("d1c2", "glm4_moe")]
CELLS = [
    *CHEAP,
    *((layout, name) for layout in ("d1", "d1t2", "d2e2", "d1t2|ffn:d1t2") for name in NAMES if name != "qwen3_5"),
    *((layout, name) for layout in ("d1c2",) for name in ("deepseek_v3", "qwen3_next")),
    ("d1", "qwen3_5"),
    ("d2t2", "qwen3_5"),
]
CELLS = list(dict.fromkeys(CELLS))
WITH_FLOAT32_LOGITS = ("d1t2", "glm4_moe")
"""The cell with model.float32_logits, which is another way to compute the same in float32."""


def on_rank(
    rank: int, init_method: str, folder: str, layout: str, modes: list[MtpConfig], float32_logits: bool
) -> list[dict[str, Any]]:
    """Gradients, weights and metrics of one rank, for each setting of the head."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    results = []
    for index, mtp in enumerate(modes):
        setup = TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=device,
            model=ModelConfig(path=folder, float32_logits=float32_logits),
            train=TrainConfig(
                parallel=layout, dtype="float32", mtp=mtp, norms_every_steps=1,
                optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9),
            ),
            seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=False,
        )  # fmt: skip
        results.append(measure(Trainer(setup), layout))
        parallel.shutdown()
    return results


def measure(trainer: Any, layout: str) -> dict[str, Any]:
    """What one rank has to show."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see on_rank

    batch = sequences()
    ranks, _ = split(batch, weights_of(batch), num_ranks=Parallel.parse(layout).dp, max_tokens=40)
    mine = ranks[trainer.coordinates.dp_rank].microbatches()
    names = list(trainer.layout.tensors)
    measured = {
        "where": trainer.coordinates,
        "layout": trainer.layout,
        "names": names,
        "weights": trainer.export(names, torch.float32),
        "logprobs": trainer.logprobs(mine, reference=False),
    }
    forward.accumulate_gradients(trainer.model, mine, Weighted(), temperature=1.0)
    measured["gradients"] = exported_gradients(trainer)
    (update,) = trainer.train([mine], Weighted(), first_step=0)
    trainer.prove()
    measured["mtp_loss"] = update.metrics.get("train/mtp_loss")
    measured["after"] = trainer.export(names, torch.float32)
    return measured


def loss_of(reference: Reference) -> tuple[torch.Tensor, int]:
    """The sum of -log p over predicted tokens that are trained, one sequence at a time, and their number."""
    batch = sequences()
    total, count = torch.zeros(()), 0
    for row, mask in zip(batch.token_ids.split(LENGTHS), batch.loss_mask.split(LENGTHS), strict=True):
        if len(row) < 3:
            continue
        table = torch.log_softmax(reference.logits(row)[:-1], -1)
        nats = -table.gather(1, row[2:, None])[:, 0]
        total, count = total + (nats * mask[2:]).sum(), count + int(mask[2:].sum())
    return total, count


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(*cell, marks=[] if cell in CHEAP[:2] else [pytest.mark.thorough]) for cell in CELLS],
)
def test_the_head_trains_as_transformers_layers_do(layout: str, name: str, tmp_path: pathlib.Path) -> None:
    reference = make_with_mtp(name, tmp_path)
    folder = tmp_path / "model"
    settings = [MtpConfig(), MtpConfig(mode=MtpMode.TRAIN, loss_scaling_factor=FACTOR)]
    if (layout, name) not in CHEAP[1:]:
        settings.append(MtpConfig(mode=MtpMode.TRAIN, loss_scaling_factor=FACTOR, detach=False))
    logits = (layout, name) == WITH_FLOAT32_LOGITS
    ranks = run_distributed(on_rank, Parallel.parse(layout).world, str(folder), layout, settings, logits)
    without, detached, *joint = (list(each) for each in zip(*ranks, strict=True))
    disk = load_file(folder / "model.safetensors")

    _, of_trunk, _ = expected(reference.trunk, sequences())
    of_trunk = {key: value.clone() for key, value in of_trunk.items()}
    total, count = loss_of(reference)
    (total * FACTOR / count).backward()
    of_head = reference.gradients()

    assert set(detached[0]["names"]) == set(disk)
    head = {each for each in disk if each.startswith(("mtp.", "model.layers.2."))}
    assert set(without[0]["names"]) == set(disk) - head
    exported = assemble(detached, "weights", {key: value.shape for key, value in disk.items()})
    for key, value in disk.items():
        assert torch.equal(exported[key], value), key

    after = assemble(detached, "after", {key: disk[key].shape for key in head})
    trained = [key for key in head if not key.endswith("_bias") and not re.search(r"\.(indexer|experts)\.", key)]
    assert all(not torch.equal(after[key], disk[key]) for key in trained)
    close(detached, of_trunk | of_head)
    for mine, theirs in zip(detached, without, strict=True):
        equal(mine, theirs, of_trunk)
    assert {each["mtp_loss"] for each in without} == {None}
    reported = merge({"loss": each["mtp_loss"]} for each in detached if each["where"].reports)["loss"]
    assert reported.value == pytest.approx(float(total.detach()) / count, rel=1e-4)
    for results in joint:
        both = {key: value for key, value in of_head.items()}
        for key, value in reference.trunk.named_parameters():
            if value.grad is not None:
                both |= written(key, value.grad, reference)
        close(results, both)


def written(key: str, gradient: torch.Tensor, reference: Reference) -> dict[str, torch.Tensor]:
    """By the checkpoint's names."""
    from tests.tiny_models import on_disk  # noqa: PLC0415

    return on_disk(key, gradient, reference.trunk.config.model_type)


def close(results: list[dict[str, Any]], gradients: dict[str, torch.Tensor]) -> None:
    """Gradients of all ranks against transformers'."""
    summed = assemble(results, "gradients", {key: value.shape for key, value in gradients.items()})
    for key, value in gradients.items():
        torch.testing.assert_close(summed[key], value, atol=2e-5, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


def equal(mine: dict[str, Any], theirs: dict[str, Any], names: dict[str, torch.Tensor]) -> None:
    """The layers below compute the same bits with and without the head."""
    for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=True):
        assert torch.equal(a, b)
    for key in names:
        for (_, a), (_, b) in zip(mine["gradients"].get(key, ()), theirs["gradients"].get(key, ()), strict=True):
            assert torch.equal(a, b), key


def computes_again(rank: int, init_method: str, folder: str) -> list[dict[str, Any]]:
    """Gradients of one rank that keeps all activations, and of one that computes attention again."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    seen = []
    again = RecomputeConfig(modules=["core_attn"])
    for index, recompute in enumerate([{}, {"recompute": Recompute.SELECTIVE, "recompute_options": again}]):
        setup = TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=device, model=ModelConfig(path=folder),
            train=TrainConfig(dtype="float32", mtp=MtpConfig(mode=MtpMode.TRAIN), **recompute),
            seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=False,
        )  # fmt: skip
        seen.append(measure(Trainer(setup), "d1"))
        parallel.shutdown()
    return seen


def test_attention_that_is_computed_again_sees_the_keys_of_its_own_layer(tmp_path: pathlib.Path) -> None:
    make_with_mtp("deepseek_v32", tmp_path)
    ((kept, again),) = run_distributed(computes_again, 1, str(tmp_path / "model"))
    equal(again, kept, kept["gradients"])


def resumes(rank: int, init_method: str, model: str, states: str) -> list[Any]:
    """Weights after saving in one layout, and after loading in another, with and without the head."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    state, seen = pathlib.Path(states), []
    cases = [("d1t2", MtpMode.TRAIN), ("d2", MtpMode.TRAIN), ("d1p2", MtpMode.KEEP), ("d2", MtpMode.DROP)]
    for index, (layout, mode) in enumerate(cases):
        setup = TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=device, model=ModelConfig(path=model),
            train=TrainConfig(
                parallel=layout, dtype="float32", mtp=MtpConfig(mode=mode), optimizer=OptimizerConfig(lr=1e-2)
            ),
            seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=False,
        )  # fmt: skip
        trainer = Trainer(setup)
        batch = sequences()
        shares, _ = split(batch, weights_of(batch), num_ranks=Parallel.parse(layout).dp, max_tokens=40)
        mine = shares[trainer.coordinates.dp_rank].microbatches()
        if index:
            trainer.load(state, num_optimizer_steps=1)
        else:
            trainer.train([mine], Weighted(), first_step=0)
            trainer.stage(state, copy=True)
            written: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(written, trainer.write())
            trainer.complete(written)
        torch.distributed.barrier()
        names = list(trainer.layout.tensors)
        now = trainer.export(names, torch.float32)
        trainer.train([mine], Weighted(), first_step=1)
        trainer.prove()
        seen.append({"layout": trainer.layout, "now": now, "later": trainer.export(names, torch.float32)})
        parallel.shutdown()
    return seen


@pytest.mark.thorough
def test_a_checkpoint_with_the_head_loads_in_other_layouts(tmp_path: pathlib.Path) -> None:
    make_with_mtp("glm4_moe", tmp_path)
    states = tmp_path / "states"
    states.mkdir()
    disk = load_file(tmp_path / "model" / "model.safetensors")
    shapes = {key: value.shape for key, value in disk.items()}
    saved, other, kept, dropped = zip(*run_distributed(resumes, 2, str(tmp_path / "model"), str(states)), strict=True)
    before, after = assemble(list(saved), "now", shapes), assemble(list(saved), "later", shapes)
    for results in (other, kept):
        loaded = assemble(list(results), "now", shapes)
        assert all(torch.equal(loaded[key], before[key]) for key in disk)
    later = assemble(list(other), "later", shapes)
    for key, value in after.items():
        torch.testing.assert_close(later[key], value, atol=1e-5, rtol=1e-4)
    head = [key for key in disk if key.startswith("model.layers.2.")]
    still = assemble(list(kept), "later", shapes)
    assert all(torch.equal(still[key], before[key]) for key in head)
    trunk = {key: shape for key, shape in shapes.items() if key not in head}
    loaded = assemble(list(dropped), "now", trunk)
    assert all(torch.equal(loaded[key], before[key]) for key in trunk)
