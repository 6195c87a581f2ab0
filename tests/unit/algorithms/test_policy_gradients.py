"""RLOO, GSPO, CISPO, REINFORCE++, SAPO and Dr.GRPO against numbers worked by hand, and what their configs refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from rlframe.algorithms.cispo import Cispo, CispoConfig
from rlframe.algorithms.correction import CorrectionConfig, MaskConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.gspo import Gspo, GspoConfig
from rlframe.algorithms.policy_gradient import PolicyGradient
from rlframe.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlframe.algorithms.rloo import Rloo, RlooConfig
from rlframe.algorithms.sapo import Sapo, SapoConfig
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.correction import MaskOf
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch, TrainBatch
from rlframe.types.results import LossOutput, Mean, MeanIfAny, PolicyOutput

CONFIGS = Path(__file__).parents[3] / "configs" / "algorithm"
OLD = torch.tensor([0.0, -1.0, 0.0, -2.0, -3.0])
RATIOS = torch.tensor([1.0, 1.5, 1.0, 1.0, 0.5])
SAMPLED = [1, 3, 4]
ABOVE_REFERENCE = torch.tensor([9.0, 0.4, 9.0, 0.2, 0.6])
"""OLD minus the reference: with k1 at coefficient 0.5 the tokens cost 0.2 | 0.1, 0.3."""
UNIT = 0.5 / (0.5**0.5 + 1e-6)
"""Normalised advantage of rewards 1 and 0: the standard deviation is sqrt((0.25 + 0.25) / 1). 0.7071058."""


def batch(algorithm: PolicyGradient, *, rewards: tuple[float, float] = (1.0, 0.0), **fields: Tensor) -> TrainBatch:
    """Two rollouts of one prompt: tokens 1 | 3, 4 are sampled, the others prompt."""
    made = Batch(
        token_ids=torch.tensor([5, 6, 5, 7, 8]),
        lengths=torch.tensor([2, 3]),
        loss_mask=torch.tensor([False, True, False, True, True]),
        rollout_logprobs=OLD - torch.tensor([0.0, 0.25, 0.0, -0.5, 0.0]),
        group=torch.tensor([0, 0]),
        rewards=torch.tensor(rewards),
        versions=torch.zeros(5).long(),
        **fields,
    )
    return made.with_advantages(algorithm.advantages(made))


def outcome(algorithm: PolicyGradient, data: TrainBatch, ratios: Tensor = RATIOS) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient by logprob of the sampled tokens."""
    logprobs = (OLD + ratios.log()).requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.ones(5))
    result = algorithm.loss(policy, data, algorithm.token_weights(data))
    result.loss.backward()
    assert logprobs.grad is not None and not logprobs.grad[[0, 2]].any()
    return result, logprobs.grad[SAMPLED]


def assert_tokens(actual: Tensor, expected: list[float]) -> None:
    """Values at the sampled tokens, and 0 at the others."""
    torch.testing.assert_close(actual[SAMPLED], torch.tensor(expected), atol=2e-6, rtol=0)
    assert actual[[0, 2]].tolist() == [0.0, 0.0]


def test_rloo() -> None:
    algorithm = Rloo(RlooConfig())
    data = batch(algorithm, old_logprobs=OLD)
    # In a group of two the baseline is the other's reward: 1 - 0 and 0 - 1.
    assert_tokens(data.advantages, [1.0, -1.0, -1.0])
    # Ratio 1.5, A 1, clipped at 1.2: -1.2. Ratio 1, A -1: 1. Ratio 0.5, A -1, clipped at 0.8: 0.8. Sum 0.6 over the 2
    # rollouts; only the middle token has a gradient, 1 / 2.
    result, gradient = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(0.3, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.5, 0.0]))
    assert result.metrics["train/clip_fraction"] == Mean(2.0, 3.0)


def test_rloo_takes_the_kl_of_the_rollout_off_its_reward_and_leaves_the_loss_alone() -> None:
    algorithm = Rloo(RlooConfig(kl_coefficient=0.5))
    assert algorithm.needs_reference
    data = batch(algorithm, old_logprobs=OLD, reference_logprobs=OLD - ABOVE_REFERENCE)
    # Rewards 1 - 0.2 = 0.8 and 0 - (0.1 + 0.3) = -0.4.
    assert_tokens(data.advantages, [1.2, -1.2, -1.2])
    # At ratio one: (-1.2 + 1.2 + 1.2) / 2.
    result, _ = outcome(algorithm, data, torch.ones(5))
    assert result.loss.item() == pytest.approx(0.6, abs=1e-6)
    assert result.metrics["train/kl_nats"] == MeanIfAny(pytest.approx(1.2, abs=1e-6), 3.0)  # type: ignore[arg-type]


def test_without_old_logprobs_the_kl_in_the_reward_is_the_engines() -> None:
    algorithm = Rloo(RlooConfig(kl_coefficient=0.5))
    data = batch(algorithm, reference_logprobs=OLD - ABOVE_REFERENCE)
    # k1: 0.4 - 0.25 = 0.15 | 0.2 + 0.5 = 0.7 and 0.6. Rewards 1 - 0.075 = 0.925 and -0.65, their difference 1.575.
    assert_tokens(data.advantages, [1.575, -1.575, -1.575])


def test_gspo_clips_whole_rollouts() -> None:
    algorithm = Gspo(GspoConfig(clip_low=0.2, clip_high=0.2))
    data = batch(algorithm, old_logprobs=OLD)
    assert_tokens(data.advantages, [UNIT, -UNIT, -UNIT])
    # Ratios 1.5 and sqrt(1 * 0.5) = 0.707107, both clipped, the latter with its token at ratio 1: 1.2 and 0.8, so
    # (-1.2 A + 0.8 A) / 2 = -0.2 A = -0.1414212.
    result, gradient = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(-0.1414212, abs=1e-6)
    assert gradient.tolist() == [0.0] * 3
    assert result.metrics["train/clip_fraction"] == Mean(3.0, 3.0)


def test_gspo_within_its_bounds_shares_the_gradient_among_the_rollouts_tokens() -> None:
    algorithm = Gspo(GspoConfig(clip_low=0.6, clip_high=0.6))
    data = batch(algorithm, old_logprobs=OLD)
    # (-1.5 A + 0.7071068 A) / 2 = -0.3964466 A = -0.2803297. Slopes: -1.5 A / 2 = -0.5303294; the other rollout's
    # 0.7071068 A / 2 = 0.2499996 is halved over its two tokens.
    result, gradient = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(-0.2803297, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([-0.5303294, 0.1249998, 0.1249998]), atol=1e-6, rtol=0)
    assert result.metrics["train/clip_fraction"] == Mean(0.0, 3.0)


def test_gspo_gives_each_token_its_own_advantage() -> None:
    algorithm = Gspo(GspoConfig(clip_low=0.6, clip_high=0.6))
    data = batch(algorithm, old_logprobs=OLD)
    data.advantages = torch.tensor([0.0, 1.0, 0.0, -2.0, 3.0])
    # The token form of section 4.3: the value is that of the sequence's ratio, 1.5 and sqrt(0.5) = 0.7071068, and the
    # gradient is ratio * advantage of the token itself: (-1.5 * 1 / 2 + 0.7071068 * (2 - 3) / 4) = -0.9267767.
    result, gradient = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(-0.9267767, abs=1e-6)
    # -1.5 / 2, 2 * 0.7071068 / 4, -3 * 0.7071068 / 4. Through the mean both tokens would get -0.0883883.
    torch.testing.assert_close(gradient, torch.tensor([-0.75, 0.3535534, -0.5303301]), atol=1e-6, rtol=0)


def test_gspo_leaves_the_tokens_that_a_mask_rejects_out_of_gradient_and_ratio() -> None:
    mask = CorrectionConfig(masks=[MaskConfig(of=MaskOf.TOKEN, high=1.5)])
    algorithm = Gspo(GspoConfig(clip_low=0.6, clip_high=0.6, correction=mask))
    data = batch(algorithm, old_logprobs=OLD)
    # Trainer / engine is e^0.25 = 1.28, e^-0.5 and 1 by default; the token at ratio 0.5 is put at 2.
    data.rollout_logprobs = OLD - torch.tensor([0.0, 0.25, 0.0, -0.5, 0.6931472])
    _, gradient = outcome(algorithm, data)
    # The second rollout's ratio is that of its token that is kept, 1; the denominator is still its two tokens.
    torch.testing.assert_close(gradient, torch.tensor([-0.75, 0.25, 0.0]) * UNIT, atol=1e-6, rtol=0)


def test_cispo() -> None:
    algorithm = Cispo(CispoConfig(clip_low=0.2, clip_high=0.2))
    data = batch(algorithm, old_logprobs=OLD)
    assert_tokens(data.advantages, [UNIT, -UNIT, -UNIT])
    # Weights 1.2, 1, 0.8; logprobs -1 + 0.405465, -2, -3 - 0.693147. -weight A logprob: (0.713442 - 2 - 2.954518) A =
    # -4.241076 A, over 3 tokens -0.9996260. Slopes -weight A / 3: clipped tokens keep theirs.
    result, gradient = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(-4.241076 * 0.7071058 / 3, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([-0.2828423, 0.2357019, 0.1885615]), atol=1e-6, rtol=0)
    assert result.metrics["train/clip_fraction"] == Mean(2.0, 3.0)


def test_cispos_default_has_no_lower_bound_and_a_cap_of_five() -> None:
    algorithm = Cispo(CispoConfig())
    ratios = torch.tensor([1.0, 8.0, 1.0, 1.0, 0.01])
    result, gradient = outcome(algorithm, batch(algorithm, old_logprobs=OLD), ratios)
    expected = torch.tensor([-5.0, 1.0, 0.01]) * UNIT / 3
    torch.testing.assert_close(gradient, expected)
    assert result.metrics["train/clip_fraction"] == Mean(1.0, 3.0)


def test_reinforce_plus_plus_whitens_returns_over_the_batch() -> None:
    algorithm = ReinforcePlusPlus(ReinforcePlusPlusConfig(discount=0.5))
    data = batch(algorithm, rewards=(1.0, 2.0), old_logprobs=OLD)
    # Returns 1 | 0.5 * 2, 2: mean 4/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3.
    assert_tokens(data.advantages, [-0.577350, -0.577350, 1.154701])
    # Ratio 1.5: 0.866025 is above 1.2 * 0.577350. Ratio 1: 0.577350. Ratio 0.5: -0.577350. Sum 0.866025 over 3.
    result, _ = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(0.288675, abs=1e-6)


def test_reinforce_plus_plus_takes_the_kl_off_each_tokens_reward() -> None:
    algorithm = ReinforcePlusPlus(ReinforcePlusPlusConfig(discount=0.5, kl_coefficient=0.5))
    data = batch(algorithm, rewards=(1.0, 2.0), old_logprobs=OLD, reference_logprobs=OLD - ABOVE_REFERENCE)
    # Returns 1 - 0.2 = 0.8 | -0.1 + 0.5 * 1.7 = 0.75, 2 - 0.3 = 1.7. Mean 1.083333, squares 0.080278 + 0.111111 +
    # 0.380278 = 0.571667, standard deviation sqrt(0.285833) = 0.534634.
    expected = [-0.283333 / 0.534634, -0.333333 / 0.534634, 0.616667 / 0.534634]
    assert_tokens(data.advantages, expected)
    # The loss has no KL term: at ratio one it is minus the mean of whitened values.
    result, gradient = outcome(algorithm, data, torch.ones(5))
    assert result.loss.item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(gradient, -torch.tensor(expected) / 3, atol=2e-6, rtol=0)


def test_reinforce_plus_plus_with_the_groups_baseline() -> None:
    settings = yaml.safe_load((CONFIGS / "reinforce_plus_plus_baseline.yaml").read_text())
    algorithm = ReinforcePlusPlus(ReinforcePlusPlusConfig(**settings, kl_coefficient=0.5))
    data = batch(algorithm, rewards=(1.0, 2.0), old_logprobs=OLD, reference_logprobs=OLD - ABOVE_REFERENCE)
    # -0.5 - 0.2 = -0.7 | 0.5 - 0.1 = 0.4, 0.5 - 0.3 = 0.2. Mean -0.033333, squares 0.444444 + 0.187778 + 0.054444 =
    # 0.686667, standard deviation sqrt(0.343333) = 0.585947.
    assert_tokens(data.advantages, [-0.666667 / 0.585947, 0.433333 / 0.585947, 0.233333 / 0.585947])


def test_sapo() -> None:
    algorithm = Sapo(SapoConfig())
    data = batch(algorithm, old_logprobs=OLD)
    assert_tokens(data.advantages, [UNIT, -UNIT, -UNIT])
    # Gates: 4 sigmoid(0.5) = 2.489837; 4 / 1.05 / 2 = 1.904762; 4 / 1.05 sigmoid(-0.525) = 3.809524 * 0.371684 =
    # 1.415939. (-2.489837 + (1.904762 + 1.415939) / 2) / 2 = -0.4147433 times A: -0.2932674.
    result, gradient = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(-0.2932674, abs=1e-6)
    # Slopes 4 s (1 - s): 0.940015, 1, 0.934140; times ratio, A and the weights 1/2, 1/4, 1/4.
    expected = torch.tensor([-0.940015 * 1.5 / 2, 1 / 4, 0.934140 * 0.5 / 4]) * UNIT
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)
    assert result.metrics["train/gate_slope"] == Mean(pytest.approx(2.874155, abs=3e-6), 3.0)  # type: ignore[arg-type]


def test_dr_grpo_is_grpo_without_either_division() -> None:
    settings = yaml.safe_load((CONFIGS / "dr_grpo.yaml").read_text()) | {"constant_length": 10}
    enums = {"aggregation": Aggregation(settings["aggregation"]), "normalize_by": NormalizeBy(settings["normalize_by"])}
    algorithm = Grpo(GrpoConfig(**settings | enums))
    data = batch(algorithm, old_logprobs=OLD)
    assert_tokens(data.advantages, [0.5, -0.5, -0.5])
    # -0.6 + 0.5 + 0.4 = 0.3 over 2 rollouts of constant length 10.
    result, _ = outcome(algorithm, data)
    assert result.loss.item() == pytest.approx(0.015, abs=1e-7)


ALL = [Rloo(RlooConfig()), Gspo(GspoConfig()), Cispo(CispoConfig()), Sapo(SapoConfig())]
ALL += [ReinforcePlusPlus(ReinforcePlusPlusConfig()), ReinforcePlusPlus(ReinforcePlusPlusConfig(group_baseline=True))]


@pytest.mark.parametrize("algorithm", ALL, ids=lambda algorithm: algorithm.config.name)
def test_at_ratio_one_all_have_the_policy_gradient(algorithm: PolicyGradient) -> None:
    for old in ({}, {"old_logprobs": OLD}):
        data = batch(algorithm, **old)
        _, gradient = outcome(algorithm, data, torch.ones(5))
        expected = -(algorithm.token_weights(data) * data.advantages)[SAMPLED]
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda algorithm: algorithm.config.name)
def test_equal_rewards_give_no_advantage(algorithm: PolicyGradient) -> None:
    assert batch(algorithm, rewards=(0.1, 0.1)).advantages.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        *(
            (config, {"group_size": 1}, f"group_size must be at least 2 for {config().name}, got 1: in a group of one")
            for config in (RlooConfig, GspoConfig, CispoConfig, SapoConfig)
        ),
        *(
            (config, {"kl_coefficient": -1.0}, "kl_coefficient must be at least 0, got -1.0")
            for config in (RlooConfig, GspoConfig, CispoConfig, SapoConfig, ReinforcePlusPlusConfig)
        ),
        *(
            (config, {"clip_low": 1.0}, "clip_low must be below 1, got 1.0")
            for config in (RlooConfig, GspoConfig, ReinforcePlusPlusConfig)
        ),
        (
            CispoConfig,
            {"clip_low": 1.1},
            r"clip_low must be at most 1 \(the weight is at least 1 - clip_low",
        ),
        (CispoConfig, {"clip_high": -0.1}, r"clip_high must be at least 0 \(the weight is at most 1 \+ clip"),
        (ReinforcePlusPlusConfig, {"group_size": 0}, "group_size must be at least 1, got 0"),
        (ReinforcePlusPlusConfig, {"discount": 0.0}, "discount must be above 0, got 0.0"),
        (ReinforcePlusPlusConfig, {"discount": 1.1}, "discount must be at most 1, got 1.1"),
        (
            ReinforcePlusPlusConfig,
            {"group_baseline": True, "group_size": 1},
            "group_size must be at least 2 for reinforce_plus_plus, got 1",
        ),
        (
            ReinforcePlusPlusConfig,
            {"group_baseline": True, "discount": 0.9},
            "discount has no effect with group_baseline, got 0.9; remove it",
        ),
        (SapoConfig, {"temperature_positive": 0.0}, "temperature_positive must be above 0, got 0.0"),
        (SapoConfig, {"temperature_negative": -1.0}, "temperature_negative must be above 0, got -1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)


def test_the_kl_in_the_reward_defaults_to_k1_and_in_the_loss_to_k3() -> None:
    assert {RlooConfig().kl_estimator, ReinforcePlusPlusConfig().kl_estimator} == {KlEstimator.K1}
    assert {GspoConfig().kl_estimator, CispoConfig().kl_estimator, SapoConfig().kl_estimator} == {KlEstimator.K3}
