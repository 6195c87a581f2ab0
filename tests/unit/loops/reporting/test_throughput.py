"""Tokens and operations by phase, worked by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rlframe.algorithms.critic import Critic
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.loops.reporting.metrics import Tokens
from rlframe.loops.reporting.throughput import Shape, Throughput
from rlframe.megatron.config.mtp import MtpConfig, MtpMode
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.ops.aggregation import Aggregation
from rlframe.run.check.context import algorithm_of
from rlframe.run.compose.throughput import throughput, trained
from rlframe.run.load import load
from tests.tiny_models import COMMON, MODELS
from tests.unit.loops.reporting.test_metrics import rollout

TIMES = {"time/train_s": 2.0, "time/reference_s": 1.0, "time/rollout_s": 4.0, "time/step_s": 8.0, "time/data_s": 1.0}


def shape(devices: int, epochs: int = 1) -> Shape:
    """A token costs 6 operations, 4 if the loss counts it, and 2 for each token of its sequence."""
    return Shape(devices=devices, operations=lambda length, share: 6 + 4 * share + 2 * length, epochs=epochs)


def test_phases_by_tokens_and_operations_of_a_device() -> None:
    throughput = Throughput(shapes={"policy": shape(2, epochs=3)}, peak=10_800.0)
    # Sequences of 4 and 12 tokens: a mean length of (16 + 144) / 16 = 10, half of them in the loss, so 28 operations a
    # token of a forward pass.
    assert throughput.of_training(TIMES, np.array([4, 12]), 8) == pytest.approx(
        {
            "throughput/train_tokens_per_s_device": 12.0,  # 3 * 16 tokens in 2 s on 2 devices
            "throughput/train_mfu_fraction": 12 * 84 / 10_800,
            "throughput/reference_tokens_per_s_device": 8.0,
            "throughput/reference_mfu_fraction": 8 * 28 / 10_800,
        }
    )


def test_tokens_that_are_computed_for_another_sequence_cost_no_operations() -> None:
    throughput = Throughput(shapes={"policy": shape(2), "critic": shape(2)}, peak=10_800.0)
    # Three sequences of 8 tokens, of which two have their first 4 from the first: 16 of 24 are computed, 8 of them in
    # the loss. The last 4 of a sequence see (64 - 16) / 2 tokens: a mean length of (3 * 64 - 2 * 16) / 16 = 10.
    found = throughput.of_training(
        {"time/train_s": 1.0, "time/critic_s": 1.0}, np.array([8, 8, 8]), 8, spared={"policy": np.array([4, 4])}
    )
    assert found == pytest.approx(
        {
            "throughput/train_tokens_per_s_device": 12.0,
            "throughput/train_mfu_fraction": 8 * 3 * (6 + 2 + 20) / 10_800,
            "throughput/critic_tokens_per_s_device": 12.0,
            "throughput/critic_mfu_fraction": 12 * 3 * (6 + 4 / 3 + 16) / 10_800,
        }
    )


def test_sampled_tokens_see_the_prompt_and_each_other() -> None:
    # Prompts of 2 tokens, responses of 2 and 6. On average they see (2 + 4) / 2 and (2 + 8) / 2 tokens, which are
    # lengths of 6 and 10: (2 * 6 + 6 * 10) / 8 = 9, so 28 operations.
    counts = Tokens.of([rollout(0, reward=0.0, length=2), rollout(1, reward=0.0, length=6)])
    throughput = Throughput(shapes={"rollout": shape(1)}, peak=10_800.0)
    expected = {"throughput/rollout_tokens_per_s_device": 2.0, "throughput/rollout_mfu_fraction": 2 * 28 / 10_800}
    assert throughput.of_sampling(TIMES, counts.lengths, counts.sampled) == pytest.approx(expected)
    # One more prompt of 2 tokens with a response of 8: a length of 12, a mean of 10.5 and 31 operations.
    expected = {"throughput/rollout_tokens_per_s_device": 4.0, "throughput/rollout_mfu_fraction": 4 * 31 / 10_800}
    found = throughput.of_sampling(TIMES, counts.lengths, counts.sampled, untrained=[(10, 8)])
    assert found == pytest.approx(expected), "what is sampled and dropped takes its part of the time"
    ahead = Throughput(shapes={"rollout": shape(1)}, samples_ahead=True)
    assert ahead.of_sampling(TIMES, counts.lengths, counts.sampled) == {
        "throughput/rollout_tokens_per_s_device": 1.0
    }, "and no peak, no MFU"


def test_nothing_is_said_of_roles_that_a_run_lacks() -> None:
    assert Throughput().of_training(TIMES, np.array([4]), 3) == {}
    assert Throughput().of_sampling(TIMES, np.array([4]), np.array([2])) == {}


@pytest.mark.parametrize(("engines", "evaluate", "devices"), [(4, 0, 2), (4, 1, 2), (4, 2, 1)])
def test_a_device_that_sampling_engines_share_with_one_that_evaluates_counts(
    engines: int, evaluate: int, devices: int
) -> None:
    settings = {"rollout.num_engines": engines, "rollout.engines_per_device": 2, "evaluation.num_engines": evaluate}
    run = load("grpo_qwen3_moe_async", [f"{key}={value}" for key, value in settings.items()])
    algorithm: Any = algorithm_of(run)
    parts: Any = SimpleNamespace(config=run, requirements=algorithm.requirements, device=torch.device("cpu"))
    assert throughput(parts, algorithm).shapes["rollout"].devices == devices


def test_training_counts_the_head_for_multi_token_prediction(tmp_path: Path) -> None:
    kind, own = MODELS["glm4_moe"]
    getattr(transformers, kind)(**COMMON | own, num_nextn_predict_layers=1).save_pretrained(tmp_path)
    model, grpo = ModelConfig(path=str(tmp_path)), Grpo(GrpoConfig())
    train = TrainConfig(mtp=MtpConfig(mode=MtpMode.TRAIN, detach=False))
    shape = trained(model, train, grpo)
    critic = Critic(aggregation=Aggregation.TOKEN_MEAN, constant_length=None, clip=None)
    assert trained(model, TrainConfig(), grpo).training is trained(model, train, critic).training is None
    assert shape.training is not None
    # Of 64 numbers: attention of 4 heads of 32 and 2 of keys, which sees 5 tokens; three matrices of 48 in the 2 of 8
    # experts and in the 2 shared ones, and the router; states joined with embeddings. Both heads have 67 logits of
    # each token, and without the loss a quarter of them is computed.
    layer = 2 * (2 * 64 * 128 + 2 * 64 * 64) + 4 * 5 * 128 + 2 * 3 * 64 * 48 * 4 + 2 * 64 * 8
    logits = 2 * 64 * 67
    added = shape.training(10.0, 0.25) - shape.operations(10.0, 0.25)
    assert added == pytest.approx(layer + 2 * logits - logits / 4 + 4 * 64**2)
    throughput = Throughput(shapes={"policy": shape}, peak=1e6)
    found = throughput.of_training({"time/train_s": 1.0, "time/reference_s": 1.0}, np.array([10]), 5)
    forward, both = shape.operations(10.0, 0.5), shape.training(10.0, 0.5)
    assert found["throughput/train_mfu_fraction"] == pytest.approx(10 * 3 * both / 1e6)
    assert found["throughput/reference_mfu_fraction"] == pytest.approx(10 * forward / 1e6)
