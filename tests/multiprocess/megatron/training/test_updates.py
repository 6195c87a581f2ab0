"""Optimizer steps equal torch's AdamW on transformers' gradients, with every setting away from its default."""

import pathlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from rlframe.megatron.config.optimizer import OptimizerConfig, Schedule
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.models.config import ModelConfig
from rlframe.types.batch import Sequences
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.gradients.comparison import assemble
from tests.multiprocess.megatron.test_layouts import Weighted, sequences, weights_of
from tests.tiny_models import make, on_disk

OPTIMIZER = {
    "lr": 3e-3, "min_lr": 1e-3, "schedule": Schedule.LINEAR, "warmup_steps": 2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3,
    "weight_decay": 0.3, "clip_grad": 0.05,
}  # fmt: skip
STEPS = 4
BY_PART = ("train/grad_norm_", "train/update_ratio")
RATES = [1.5e-3, 3e-3, 3e-3, 1e-3]
"""Two steps of warm-up to 3e-3, and a linear decay from step 2, where it begins, to 1e-3 at the last."""


def part(step: int) -> tuple[Sequences, torch.Tensor]:
    """Returns another half of the sequences for each optimizer step, with weights of its own."""
    batch = sequences()
    halves = [0, 2, 4, 6] if step % 2 else [1, 3, 5]
    chosen = batch.select(halves)
    return chosen, weights_of(chosen) * (step + 1)


def on_rank(rank: int, init_method: str, folder: str, layout: str) -> dict[str, Any]:
    """Takes the steps, and returns this rank's weights, the norms and the rates."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    setup = TrainerSetup(
        rank=rank, init_method=init_method, device=device, model=ModelConfig(path=folder),
        train=TrainConfig(
            parallel=layout, dtype="float32", optimizer=OptimizerConfig(**OPTIMIZER), norms_every_steps=1
        ),
        seed=0, temperature=1.0, total_optimizer_steps=STEPS, timeout_s=60, with_reference=False,
    )  # fmt: skip
    trainer = Trainer(setup)
    dp = trainer.coordinates.dp_rank
    world = 2 if layout == "d2" else 1
    steps = [split(*part(step), num_ranks=world, max_tokens=40)[0][dp].microbatches() for step in range(STEPS)]
    # Two calls, as two batches of two minibatches would make them.
    updates = trainer.train(steps[:2], Weighted(), first_step=0) + trainer.train(steps[2:], Weighted(), first_step=2)
    return {
        "weights": trainer.export(list(trainer.layout.tensors), torch.float32),
        "norms": [each.metrics["train/grad_norm"].value for each in updates],
        "rates": [each.metrics["train/lr"].value for each in updates],
        "by_part": [
            {key: metric.value for key, metric in each.metrics.items() if key.startswith(BY_PART)} for each in updates
        ],
    }


def by_torch(model: Any) -> tuple[list[float], list[dict[str, float]]]:
    """Takes the same steps with torch's AdamW; returns the gradient norms before clipping, and the norms by part."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
        eps=OPTIMIZER["eps"],
    )
    norms, by_part = [], []
    for step, rate in enumerate(RATES):
        chosen, weights = part(step)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for row, weight in zip(
            chosen.token_ids.split(chosen.lengths.tolist()), weights.split(chosen.lengths.tolist()), strict=True
        ):
            table = torch.log_softmax(model(row[None]).logits[0].float(), -1)
            loss = loss - (weight[1:] * table[:-1].gather(1, row[1:, None])[:, 0]).sum()
        loss.backward()
        found = {f"train/grad_norm_{name}": norm(each.grad for each in own) for name, own in parts(model).items()}
        before = {each: each.detach().clone() for each in model.parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, own in {**{f"_{name}": own for name, own in parts(model).items()}, "": list(before)}.items():
            found[f"train/update_ratio{name}"] = norm(each - before[each] for each in own) / norm(own)
        by_part.append(found)
    return norms, by_part


def parts(model: Any) -> dict[str, list[torch.nn.Parameter]]:
    """Returns the parameters of transformers' model by the part that they belong to."""
    words = {"norms": "norm.", "attention": "self_attn", "mlp": "mlp", "embedding": "embed_tokens", "head": "lm_head"}
    found: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(next(part for part, word in words.items() if word in name), []).append(parameter)
    return found


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the norm of all elements."""
    return float(torch.cat([each.detach().flatten().double() for each in tensors]).norm())


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_every_setting_of_the_optimizer_does_what_torchs_does(tmp_path: pathlib.Path, layout: str) -> None:
    model = make("qwen3", tmp_path)
    ranks = run_distributed(on_rank, 2 if layout == "d2" else 1, str(tmp_path), layout)
    norms, by_part = by_torch(model)
    assert min(norms) > 2 * OPTIMIZER["clip_grad"], "every step is clipped"
    assert ranks[0]["norms"] == pytest.approx(norms, rel=1e-4)
    assert ranks[0]["rates"] == pytest.approx(RATES)
    assert [pytest.approx(each, rel=1e-3) for each in by_part] == ranks[0]["by_part"] == ranks[-1]["by_part"]
    expected: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        expected |= on_disk(name, parameter.detach(), model.config.model_type)
    ours = assemble(ranks, "weights", {key: value.shape for key, value in expected.items()})
    for name, value in expected.items():
        torch.testing.assert_close(
            ours[name], value, atol=2e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
