"""Where train.share_prompts is refused, and why."""

from dataclasses import replace
from typing import Any

import pytest

from rlframe.algorithms.dpo import Dpo, DpoConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.ppo import Ppo, PpoConfig
from rlframe.algorithms.sft import Sft, SftConfig
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.run.check.sharing import faults
from tests.unit.run.check.test_check_train import DENSE, EXPERTS

SHARED = TrainConfig(share_prompts=True, dtype=Dtype.BFLOAT16)


@pytest.mark.parametrize("algorithm", [Grpo(GrpoConfig()), Dpo(DpoConfig())])
def test_groups_and_pairs_of_dense_attention_share(algorithm: Any) -> None:
    for architecture in (DENSE, EXPERTS, None):
        assert list(faults(SHARED, algorithm, architecture, name="grpo", cuda=True)) == []


@pytest.mark.parametrize(
    ("train", "algorithm", "architecture", "said"),
    [
        ({}, Ppo(PpoConfig(group_size=1)), DENSE, "algorithm.group_size=1"),
        ({}, Sft(SftConfig()), DENSE, "has no effect with algorithm.name=NAME, whose sequences share no prompt"),
        ({"dtype": Dtype.FLOAT32}, Grpo(GrpoConfig()), DENSE, "is not supported with train.dtype=float32 on CUDA"),
        ({"parallel": "c2"}, Grpo(GrpoConfig()), DENSE, "context parallelism (c2)"),
        ({}, Grpo(GrpoConfig()), replace(DENSE, window_layers=(True,) * 6, sliding_window=8), "sliding windows"),
        ({}, Grpo(GrpoConfig()), replace(DENSE, sinks=True), "qwen3 of model.path, which has attention sinks"),
    ],
)
def test_it_is_refused_with_the_reason(train: dict[str, Any], algorithm: Any, architecture: Any, said: str) -> None:
    (fault,) = faults(replace(SHARED, **train), algorithm, architecture, name="NAME", cuda=True)
    assert str(fault).startswith("train.share_prompts") and said in str(fault)
    assert list(faults(TrainConfig(**train), algorithm, architecture, name="NAME", cuda=True)) == []


def test_float32_is_shared_on_a_cpu() -> None:
    train = replace(SHARED, dtype=Dtype.FLOAT32)
    assert list(faults(train, Grpo(GrpoConfig()), DENSE, name="grpo", cuda=False)) == []
