"""What names the reference logprobs of a model: its weights, and the settings that decide what is computed of them."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframe.megatron.config.options import Fp8Config, Fp8Recipe, MoeConfig, RouterDtype
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.megatron.worker.trainer import Trainer
from rlframe.models.config import ModelConfig
from rlframe.weight_sync.layout.memory import identity_layout

SETUP = TrainerSetup(
    model=ModelConfig(),
    train=TrainConfig(),
    device=torch.device("cpu"),
    timeout_s=60,
    seed=0,
    total_optimizer_steps=1,
    with_reference=True,
)


def fingerprint(setup: TrainerSetup, weight: float = 0.5) -> str:
    """That of a model of one parameter."""
    trainer: Any = object.__new__(Trainer)
    held = {"weight": torch.full((4, 4), weight)}
    trainer.setup, trainer.layout, trainer.model = (
        setup,
        identity_layout(held),
        SimpleNamespace(parameters=held, lora=None),
    )
    return trainer.fingerprint()


def trained(**changes: Any) -> Callable[[TrainerSetup], TrainerSetup]:
    return lambda setup: replace(setup, train=replace(setup.train, **changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda setup: replace(setup, temperature=0.7),
        lambda setup: replace(setup, float32=True),
        lambda setup: replace(setup, model=ModelConfig(float32_logits=True)),
        lambda setup: replace(setup, model=ModelConfig(family="rlframe.models.families.qwen3_moe:Qwen3Moe")),
        trained(fp8=Fp8Config(recipe=Fp8Recipe.BLOCKWISE)),
        trained(moe=MoeConfig(router_dtype=RouterDtype.FLOAT64)),
        trained(moe=MoeConfig(capacity_factor=1.5)),
    ],
)
def test_settings_that_change_logprobs_change_it(change: Callable[[TrainerSetup], TrainerSetup]) -> None:
    assert fingerprint(change(SETUP)) != fingerprint(SETUP)


def test_weights_change_it_and_the_seed_does_not() -> None:
    assert fingerprint(SETUP, weight=0.25) != fingerprint(SETUP)
    assert fingerprint(replace(SETUP, seed=1)) == fingerprint(SETUP)
