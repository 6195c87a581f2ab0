"""GRPO against a loss worked by hand, and what its config refuses."""

import dataclasses
import math

import pytest
import torch

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch, TrainBatch
from rlframe.types.results import EffectiveSize, Mean, MeanIfAny, Metric, Peak, PolicyOutput, Sum

OLD = torch.tensor([0.0, -1.0, 0.0, -2.0, -3.0])
RATIOS = torch.tensor([1.0, 1.5, 1.0, 1.0, 0.5])


def batch(algorithm: Grpo, **fields: torch.Tensor) -> TrainBatch:
    """Two rollouts of one prompt, rewards 1 and 0: tokens 1 | 3, 4 are sampled, the others prompt."""
    made = Batch(
        token_ids=torch.tensor([5, 6, 5, 7, 8]),
        lengths=torch.tensor([2, 3]),
        loss_mask=torch.tensor([False, True, False, True, True]),
        rollout_logprobs=OLD - torch.tensor([0.0, 0.25, 0.0, -0.5, 0.0]),
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0]),
        versions=torch.zeros(5).long(),
        **fields,
    )
    return made.with_advantages(algorithm.advantages(made))


def test_advantages_lie_on_the_sampled_tokens() -> None:
    plain = batch(Grpo(GrpoConfig(normalize_by=NormalizeBy.NONE))).advantages
    assert plain.tolist() == [0.0, 0.5, 0.0, -0.5, -0.5]
    # The standard deviation of 1 and 0 is sqrt((0.25 + 0.25) / 1) = 0.707107.
    normalised = batch(Grpo(GrpoConfig())).advantages
    torch.testing.assert_close(normalised, torch.tensor([0, 0.707106, 0, -0.707106, -0.707106]))


def test_the_loss_and_its_metrics_have_the_values_worked_by_hand() -> None:
    algorithm = Grpo(
        GrpoConfig(
            normalize_by=NormalizeBy.NONE, kl_coefficient=0.1, kl_estimator=KlEstimator.K2, entropy_coefficient=0.3
        )
    )
    logprobs = OLD + RATIOS.log()
    data = batch(algorithm, old_logprobs=OLD, reference_logprobs=logprobs - torch.tensor([9.0, 0.2, 9.0, 0.4, 0.0]))
    entropy = torch.tensor([9.0, 1.0, 9.0, 2.0, 3.0])
    result = algorithm.loss(PolicyOutput(logprobs=logprobs, entropy=entropy), data, algorithm.token_weights(data))
    # Surrogate: ratio 1.5, A 0.5, clipped at 1.2: -0.6. Ratio 1, A -0.5: 0.5. Ratio 0.5, A -0.5, clipped at 0.8: 0.4.
    # Sum 0.3. KL: 0.2^2 / 2 = 0.02 and 0.4^2 / 2 = 0.08, sum 0.1, times 0.1: 0.01. Entropy: 6, times 0.3: 1.8.
    # Mean over 3 tokens: (0.3 + 0.01 - 1.8) / 3 = -0.4966667.
    expected = -1.49 / 3
    assert float(result.loss) == pytest.approx(expected, abs=1e-6)
    flat = {key: (type(metric), *vars_of(metric)) for key, metric in result.metrics.items()}
    assert flat == {
        "train/loss": (Sum, pytest.approx(expected, abs=1e-6)),
        "train/clip_fraction": (Mean, 2.0, 3.0),
        "train/entropy_nats": (Mean, 6.0, 3.0),
        "train/kl_nats": (MeanIfAny, pytest.approx(0.1, abs=1e-6), 3.0),
        "rollout/logprob_gap_mean_nats": (MeanIfAny, 0.75, 3.0),
        "rollout/logprob_gap_max_nats": (Peak, 0.5),
        # d = 0.25, -0.5, 0: e^0.25 + e^0.5 + 1; 0.5 - 0.25; e^0.25 - 1.25 + e^-0.5 - 0.5.
        "rollout/logprob_gap_exp_mean": (MeanIfAny, pytest.approx(3.9327467, abs=1e-6), 3.0),
        "rollout/engine_kl_k1_nats": (MeanIfAny, 0.25, 3.0),
        "rollout/engine_kl_k3_nats": (MeanIfAny, pytest.approx(0.1405561, abs=1e-6), 3.0),
        # w = 1.2840254, 0.6065307, 1: their sum, and 1.6487213 + 0.3678794 + 1.
        "rollout/effective_fraction": (EffectiveSize, pytest.approx(2.8905561), pytest.approx(3.0166007), 3.0),
        "rollout/masked_fraction": (Mean, 0.0, 3.0),
    }


def vars_of(metric: Metric) -> tuple[float, ...]:
    """The metric's numbers."""
    return dataclasses.astuple(metric)


@pytest.mark.parametrize("mode", Aggregation)
def test_at_ratio_one_the_gradient_is_minus_weight_times_advantage(mode: Aggregation) -> None:
    length = 5 if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None
    algorithm = Grpo(GrpoConfig(aggregation=mode, constant_length=length))
    for old in ({}, {"old_logprobs": OLD}):
        data = batch(algorithm, **old)
        weights = algorithm.token_weights(data)
        logprobs = OLD.clone().requires_grad_()
        result = algorithm.loss(PolicyOutput(logprobs=logprobs, entropy=torch.ones(5)), data, weights)
        result.loss.backward()
        torch.testing.assert_close(logprobs.grad, -weights * data.advantages)
        assert result.metrics["train/clip_fraction"] == Mean(0.0, 3.0)


def test_without_old_logprobs_the_gap_is_taken_from_the_policys_own() -> None:
    algorithm = Grpo(GrpoConfig())
    data = batch(algorithm)
    policy = PolicyOutput(logprobs=OLD + 1.0, entropy=torch.ones(5))
    metrics = algorithm.loss(policy, data, algorithm.token_weights(data)).metrics
    # |1 + 0.25|, |1 - 0.5| and |1|
    assert metrics["rollout/logprob_gap_mean_nats"] == MeanIfAny(2.75, 3.0)
    assert metrics["rollout/logprob_gap_max_nats"] == Peak(1.25)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_pulls_towards_the_reference(estimator: KlEstimator) -> None:
    """At equal rewards only the KL is left: a step against its gradient brings the policy closer, for k2 and k3."""
    algorithm = Grpo(GrpoConfig(kl_coefficient=1.0, kl_estimator=estimator))
    data = batch(algorithm, reference_logprobs=OLD + math.log(2))
    data.advantages.zero_()
    logprobs = OLD.clone().requires_grad_()
    weights = algorithm.token_weights(data)
    algorithm.loss(PolicyOutput(logprobs=logprobs, entropy=torch.ones(5)), data, weights).loss.backward()
    # d = -log 2: the slopes are 1, d and 1 - exp(-d), over 3 tokens. k3_plus has that of k2; k3_weighted adds the
    # ratio's, which is the value at ratio one, 2 - log 2 - 1.
    slopes = {"k1": 1.0, "k2": -math.log(2), "k3": -1.0, "k3_plus": -math.log(2), "k3_weighted": -math.log(2)}
    slope = slopes[estimator]
    torch.testing.assert_close(logprobs.grad, slope * weights)


def test_what_a_config_needs_from_the_loop() -> None:
    plain, both = Grpo(GrpoConfig()), Grpo(GrpoConfig(group_size=3, kl_coefficient=0.1, entropy_coefficient=0.1))
    assert (plain.group_size, plain.needs_reference) == (8, False)
    assert (both.group_size, both.needs_reference) == (3, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"group_size": 1}, "group_size must be at least 2 for grpo, got 1: in a group of one every advantage is 0"),
        ({"clip_low": 1.0}, "clip_low must be below 1, got 1.0"),
        ({"clip_low": -0.1}, "clip_low must be at least 0, got -0.1"),
        ({"clip_high": -0.1}, "clip_high must be at least 0, got -0.1"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be at least 0, got -1.0"),
        (
            {"aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM_NORM},
            "constant_length must be at least 1 token with aggregation=seq_mean_token_sum_norm, got null",
        ),
        (
            {"aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, "constant_length": 0},
            "constant_length must be at least 1 token with aggregation=seq_mean_token_sum_norm, got 0",
        ),
        ({"constant_length": 5}, "constant_length has no effect with aggregation=token_mean, got 5; remove it"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrpoConfig(**wrong)
