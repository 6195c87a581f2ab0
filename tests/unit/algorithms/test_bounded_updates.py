"""GMPO, DPPO, Clip-Cov and KL-Cov against numbers worked by hand, and what their configs refuse."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.clip_cov import ClipCov, ClipCovConfig
from rlframe.algorithms.correction import CorrectionConfig
from rlframe.algorithms.dppo import Dppo, DppoConfig
from rlframe.algorithms.gmpo import Gmpo, GmpoConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.kl_cov import KlCov, KlCovConfig
from rlframe.algorithms.policy_gradient import PolicyGradient
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.choice import above_quantile, covariances, drawn, greatest
from rlframe.ops.correction import RatioOf
from rlframe.ops.surrogate import Trust
from rlframe.types.batch import Batch, TrainBatch
from rlframe.types.results import LossOutput, Mean, PolicyOutput

OLD = torch.tensor([0.0, -1.0, 0.0, -2.0, -3.0])
SAMPLED = [1, 3, 4]
PLAIN: dict[str, Any] = {"normalize_by": NormalizeBy.NONE}
"""Rewards 2 and 0 then are advantages 1 and -1."""


def made(old: Tensor = OLD) -> Batch:
    """Two rollouts of one prompt, rewards 2 and 0: tokens 1 | 3, 4 are sampled, the others prompt."""
    return Batch(
        token_ids=torch.tensor([5, 6, 5, 7, 8]),
        lengths=torch.tensor([2, 3]),
        loss_mask=torch.tensor([False, True, False, True, True]),
        rollout_logprobs=old,
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([2.0, 0.0]),
        versions=torch.zeros(5).long(),
        old_logprobs=old,
    )


def batch(algorithm: PolicyGradient, old: Tensor = OLD) -> TrainBatch:
    """The batch of `made` with its advantages, 1 and -1."""
    return algorithm.train_batch(made(old))


def outcome(algorithm: PolicyGradient, data: TrainBatch, moved: list[float]) -> tuple[LossOutput, list[float]]:
    """The loss and its gradient by the sampled tokens' logprobs, which have moved by so many nats."""
    assert data.old_logprobs is not None
    logprobs = (data.old_logprobs + torch.zeros(5).index_put((torch.tensor(SAMPLED),), torch.tensor(moved))).detach()
    logprobs.requires_grad_()
    result = algorithm.loss(PolicyOutput(logprobs=logprobs, entropy=torch.ones(5)), data, algorithm.token_weights(data))
    result.loss.backward()
    assert logprobs.grad is not None and not logprobs.grad[[0, 2]].any()
    return result, logprobs.grad[SAMPLED].tolist()


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    algorithm = Gmpo(GmpoConfig(**PLAIN, clip_low=0.3, clip_high=0.4))
    # A = 1 and log-ratio 0.5 counts as 0.4: ratio e^0.4 = 1.491825, without gradient. A = -1: -0.5 counts as -0.3, and
    # 0.7, to which no clip applies on that side, as it is: mean 0.2, ratio 1.221403. (-1.491825 + 1.221403) / 2.
    result, gradient = outcome(algorithm, batch(algorithm), [0.5, -0.5, 0.7])
    assert result.loss.item() == pytest.approx(-0.135211, abs=1e-6)
    # 1.221403 / (2 rollouts * 2 tokens) at the token that is not clipped.
    assert gradient == pytest.approx([0.0, 0.0, 0.305351], abs=1e-6)
    assert result.metrics["train/clip_fraction"] == Mean(2.0, 3.0)


def test_gmpo_gives_each_token_its_own_advantage() -> None:
    algorithm = Gmpo(GmpoConfig(**PLAIN))
    data = batch(algorithm)
    data.advantages = torch.tensor([0.0, 1.0, 0.0, -2.0, 3.0])
    # Log-ratios 0.2 and -0.1, within 0.4: ratio e^0.05 = 1.051271 at both, over 4.
    _, gradient = outcome(algorithm, data, [0.0, 0.2, -0.1])
    assert gradient == pytest.approx([-0.5, 2 * 0.262818, -3 * 0.262818], abs=1e-6)


def test_dppo_stops_a_token_whose_probability_has_moved_too_far_its_advantages_way() -> None:
    algorithm = Dppo(DppoConfig(**PLAIN, limit_low=0.05, limit_high=0.05))
    old = torch.tensor([1.0, 0.01, 1.0, 0.5, 0.5]).log()
    # Probabilities 0.01 -> 0.03 (by ratio 3, which PPO clips at 1.2), 0.5 -> 0.4 (down by 0.1: stopped), 0.5 -> 0.6
    # (up, although bad: free, at ratio 1.2). -A r logprob: -3 log 0.03 = 10.519674; 1.2 log 0.6 = -0.612991.
    moved = [math.log(3), math.log(0.8), math.log(1.2)]
    result, gradient = outcome(algorithm, batch(algorithm, old), moved)
    assert result.loss.item() == pytest.approx((10.519674 - 0.612991) / 3, abs=1e-5)
    assert gradient == pytest.approx([-3 / 3, 0.0, 1.2 / 3], abs=1e-5)
    assert result.metrics["train/clip_fraction"] == Mean(1.0, 3.0)
    capped = Dppo(DppoConfig(**PLAIN, limit_low=0.05, limit_high=0.05, ratio_cap=2.0))
    assert outcome(capped, batch(capped, old), moved)[1] == pytest.approx([-2 / 3, 0.0, 1.2 / 3], abs=1e-5)


def test_dppo_by_kl_bounds_the_binary_divergence() -> None:
    old = torch.tensor([1.0, 0.01, 1.0, 0.5, 0.5]).log()
    moved = [math.log(3), math.log(0.8), math.log(1.2)]
    # KL of (p, 1 - p) from (q, 1 - q): 0.01 log(1/3) + 0.99 log(0.99 / 0.97) = 0.009219; 0.5 log(1.25) + 0.5 log(5 / 6)
    # = 0.020411 for 0.4, and as much for 0.6, which its advantage does not stop.
    for low, high, expected in (
        (0.0205, 0.0093, [-1.0, 0.8 / 3, 0.4]),
        (0.0203, 0.0093, [-1.0, 0.0, 0.4]),
        (0.0205, 0.0091, [0.0, 0.8 / 3, 0.4]),
    ):
        algorithm = Dppo(DppoConfig(**PLAIN, divergence=Trust.KL, limit_low=low, limit_high=high))
        assert outcome(algorithm, batch(algorithm, old), moved)[1] == pytest.approx(expected, abs=1e-5)


def test_a_tokens_covariance_is_of_its_logprob_and_its_advantage() -> None:
    # Logprobs -1, -2, -3 and advantages 1, -1, -1 with means -2 and -1/3: 1 * 4/3, 0 * -2/3, -1 * -2/3.
    mask = torch.tensor([False, True, False, True, True])
    shares = covariances(OLD, torch.tensor([9.0, 1.0, 9.0, -1.0, -1.0]), mask)
    torch.testing.assert_close(shares[SAMPLED], torch.tensor([4 / 3, 0.0, 2 / 3]))
    assert shares[[0, 2]].tolist() == [-math.inf] * 2
    assert covariances(OLD, OLD, ~torch.ones(5, dtype=torch.bool)).tolist() == [-math.inf] * 5


def test_the_greatest_and_the_drawn_do_not_depend_on_the_order() -> None:
    values = torch.tensor([3.0, 1.0, -math.inf, 2.0, 2.0])
    assert greatest(values, 1).tolist() == [True, False, False, False, False]
    # Two are equal: both, whichever comes first.
    assert greatest(values, 2).tolist() == [True, False, False, True, True]
    assert greatest(values, 9).tolist() == [True, True, False, True, True]
    assert not greatest(torch.full((3,), -math.inf), 2).any()
    generator = torch.Generator().manual_seed(1)
    logprobs, tokens = -torch.rand(4000, generator=generator), torch.randint(0, 50, (4000,), generator=generator)
    candidates = torch.rand(4000, generator=generator) < 0.5
    chosen = drawn(candidates, 500, token_ids=tokens, values=logprobs)
    assert int(chosen.sum()) == 500 and not chosen[~candidates].any()
    order = torch.randperm(4000, generator=generator)
    again = drawn(candidates[order], 500, token_ids=tokens[order], values=logprobs[order])
    assert again.tolist() == chosen[order].tolist()
    # A draw and no choice by value: the mean is that of all, -0.5, but for 3.5 standard errors of 0.289 / sqrt(500).
    assert abs(float(logprobs[chosen].mean()) + 0.5) < 0.045


@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 5), (0.5, 3), (0.4, 2), (0.2, 1), (0.01, 1)])
def test_the_quantile_is_torchs_interpolated(fraction: float, kept: int) -> None:
    # Of 1..5 the quantiles 0, 0.5, 0.6, 0.8 and 0.99 are 1, 3, 3.4, 4.2 and 4.96.
    values, mask = torch.tensor([9.0, 4.0, 1.0, 5.0, 3.0, 2.0]), torch.tensor([False] + [True] * 5)
    above = above_quantile(values, mask, fraction)
    assert int(above.sum()) == kept and not above[0]
    assert above[1:].tolist() == (values[1:] >= torch.quantile(values[1:], 1 - fraction)).tolist()


def test_only_tokens_of_great_entropy_have_a_surrogate() -> None:
    algorithm = Grpo(GrpoConfig(**PLAIN, top_entropy_fraction=0.5, entropy_coefficient=0.3))
    data = algorithm.with_entropies(batch(algorithm), torch.tensor([9.0, 0.1, 9.0, 0.3, 0.2]))
    assert isinstance(data, TrainBatch) and data.uncertain is not None
    # The quantile of 0.1, 0.2 and 0.3 is 0.2: the first token is left out. At ratio one the others have 1/3 each.
    assert data.uncertain.tolist() == [False, False, False, True, True]
    result, gradient = outcome(algorithm, data, [0.0, 0.0, 0.0])
    assert gradient == pytest.approx([0.0, 1 / 3, 1 / 3], abs=1e-6)
    # (1 + 1) / 3, and the entropy of 1 of every token.
    assert result.loss.item() == pytest.approx(2 / 3 - 0.3, abs=1e-6)


def test_clip_cov_takes_the_gradient_of_those_it_draws() -> None:
    # Covariances 4/3, 0, 2/3: one lies between 1 and 5, two above -1 and below 1.
    algorithm = ClipCov(ClipCovConfig(**PLAIN))
    result, gradient = outcome(algorithm, batch(algorithm), [0.0, 0.0, 0.0])
    assert gradient == pytest.approx([0.0, 1 / 3, 1 / 3], abs=1e-6)
    assert result.loss.item() == pytest.approx(2 / 3, abs=1e-6)
    assert result.metrics["train/chosen_fraction"] == Mean(1.0, 3.0)
    both = ClipCov(ClipCovConfig(**PLAIN, covariance_low=-1.0, covariance_high=1.0, chosen_fraction=0.7))
    assert outcome(both, batch(both), [0.0, 0.0, 0.0])[1] == pytest.approx([-1 / 3, 0.0, 0.0], abs=1e-6)
    # int(0.5 * 3) = 1 of the two.
    one = ClipCov(ClipCovConfig(**PLAIN, covariance_low=-1.0, covariance_high=1.0, chosen_fraction=0.5))
    assert sorted(outcome(one, batch(one), [0.0, 0.0, 0.0])[1]) == pytest.approx([-1 / 3, 0.0, 1 / 3], abs=1e-6)


def test_clip_covs_bounds_are_of_advantages_that_no_mean_weight_has_divided() -> None:
    # Each weight is 1/2: advantages are doubled, and with them two covariances would lie between 1 and 5.
    weighted = CorrectionConfig(weight=RatioOf.TOKEN, normalize_weights=True)
    algorithm = ClipCov(ClipCovConfig(**PLAIN, correction=weighted, chosen_fraction=1.0))
    data = algorithm.train_batch(replace(made(), rollout_logprobs=OLD + math.log(2)))
    assert data.advantages[SAMPLED].tolist() == pytest.approx([2.0, -2.0, -2.0], abs=1e-5)
    assert data.chosen is not None and data.chosen[SAMPLED].tolist() == [True, False, False]


def test_clip_covs_draw_is_the_same_however_the_trainer_rounds_its_logprobs() -> None:
    algorithm = ClipCov(ClipCovConfig(**PLAIN, covariance_low=-10.0, covariance_high=10.0, chosen_fraction=0.5))
    data, draws = made(), []
    for bits in range(20):
        # As another layout's or another split's would be.
        rounded = torch.where(data.loss_mask, OLD + bits * 2.0**-22, 0.0)
        chosen = algorithm.train_batch(replace(data, old_logprobs=rounded)).chosen
        assert chosen is not None
        draws.append(chosen.tolist())
    assert draws == [draws[0]] * 20 and sum(draws[0]) == 1


def test_clip_covs_other_tokens_are_clipped() -> None:
    algorithm = ClipCov(ClipCovConfig(**PLAIN))
    # 0.5 and A = -1: clipped at 0.8, no gradient; 1.1: not.
    result, gradient = outcome(algorithm, batch(algorithm), [0.0, math.log(0.5), math.log(1.1)])
    assert gradient == pytest.approx([0.0, 0.0, 1.1 / 3], abs=1e-6)
    assert result.loss.item() == pytest.approx(1.9 / 3, abs=1e-6)


def test_kl_cov_pulls_those_of_the_greatest_covariance_back() -> None:
    algorithm = KlCov(KlCovConfig(**PLAIN, penalty_coefficient=0.3, chosen_fraction=0.7))
    # int(0.7 * 3) = 2: the first and the last. Ratios 2, 2, 0.5, unclipped: (-2 + 2 + 0.5) / 3, and 0.3 * log 2 twice.
    result, gradient = outcome(algorithm, batch(algorithm), [math.log(2), math.log(2), -math.log(2)])
    assert result.loss.item() == pytest.approx((0.5 + 0.6 * math.log(2)) / 3, abs=1e-6)
    # |log-ratio| falls towards 0 from either side.
    assert gradient == pytest.approx([(-2 + 0.3) / 3, 2 / 3, (0.5 - 0.3) / 3], abs=1e-6)


def test_the_two_sided_cap_below_the_upper_bound_ends_what_good_tokens_gain() -> None:
    algorithm = Grpo(GrpoConfig(**PLAIN, clip_high=0.5, ratio_cap=1.2))
    # Ratio 1.3 and A = 1: between the cap and 1.5, so -1.2 without gradient. A = -1: 2 counts as max(1.2, 1.5), without
    # gradient; 1.3 as max(1.2, 1.3), with it.
    moved = [math.log(1.3), math.log(2), math.log(1.3)]
    result, gradient = outcome(algorithm, batch(algorithm), moved)
    assert result.loss.item() == pytest.approx((-1.2 + 1.5 + 1.3) / 3, abs=1e-6)
    assert gradient == pytest.approx([0.0, 0.0, 1.3 / 3], abs=1e-6)
    assert result.metrics["train/clip_fraction"] == Mean(2.0, 3.0)


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        *(
            (config, {"group_size": 1}, f"group_size must be at least 2 for {config().name}, got 1")
            for config in (GmpoConfig, DppoConfig, ClipCovConfig, KlCovConfig)
        ),
        (GmpoConfig, {"clip_low": math.nan}, "clip_low must be at least 0, got nan"),
        (GmpoConfig, {"clip_high": 1e300}, "clip_high must be at most 20, got 1e\\+300"),
        (DppoConfig, {"limit_low": 0.0}, "limit_low must be above 0, got 0.0"),
        (DppoConfig, {"limit_high": 1.5}, "limit_high must be at most 1 with divergence=tv, got 1.5"),
        (DppoConfig, {"ratio_cap": 0.5}, "ratio_cap must be at least 1, got 0.5"),
        (ClipCovConfig, {"chosen_fraction": 0.0}, "chosen_fraction must be above 0, got 0.0"),
        (ClipCovConfig, {"covariance_low": 5.0}, "covariance_low must be below covariance_high=5.0, got 5.0"),
        (KlCovConfig, {"penalty_coefficient": math.inf}, "penalty_coefficient must be at most 10000.0, got inf"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)
