"""Corrections between engine and trainer, worked by hand, and what their config refuses."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.correction import CorrectionConfig, MaskConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.policy_gradient import AdaptiveKlConfig
from rlframe.algorithms.rloo import RlooConfig
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.correction import MaskOf, RatioOf, engine_ratio
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch, TrainBatch
from rlframe.types.results import EffectiveSize, LossOutput, Mean, MeanIfAny, PolicyOutput, merge

OLD = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -1.0, -2.0])
SAMPLED = [1, 2, 4, 5, 6]
RATIOS = torch.tensor([9.0, 2.0, 0.25, 9.0, 1.0, 4.0, 0.5])
"""Trainer / engine: 2, 1/4 | 1, 4, 1/2. Products 1/2 and 2; geometric means 1/sqrt(2) and the cube root of 2."""
SIGNS = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0, -1.0, -1.0])
GEO = [2**-0.5] * 2 + [2 ** (1 / 3)] * 3


def mask(of: str, low: float | None = None, high: float | None = None) -> MaskConfig:
    """A mask by one statistic."""
    return MaskConfig(of=MaskOf(of), low=low, high=high)


def rollouts(*, old: bool = True) -> Batch:
    """Two rollouts of one prompt, at rewards 1 and 0."""
    return Batch(
        token_ids=torch.zeros(7).long(),
        lengths=torch.tensor([3, 4]),
        loss_mask=torch.tensor([False, True, True, False, True, True, True]),
        rollout_logprobs=OLD - RATIOS.log(),
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0]),
        versions=torch.zeros(7).long(),
        old_logprobs=OLD if old else None,
    )


def loss(correction: CorrectionConfig, *, old: bool = True, logprobs: Tensor = OLD) -> tuple[LossOutput, Tensor]:
    """The loss of two rollouts of one prompt at rewards 1 and 0 (advantages 1 and -1 over 5 tokens), and 5 times its
    gradient by the sampled tokens' logprobs."""
    algorithm = Grpo(GrpoConfig(correction=correction))
    batch: TrainBatch = rollouts(old=old).with_advantages(SIGNS)
    own = logprobs.clone().requires_grad_()
    result = algorithm.loss(PolicyOutput(logprobs=own, entropy=torch.ones(7)), batch, algorithm.token_weights(batch))
    result.loss.backward()
    assert own.grad is not None and not own.grad[[0, 3]].any()
    return result, 5 * own.grad[SAMPLED]


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({}, [1, 1, 1, 1, 1]),
        # Decoupled PPO, and token TIS: 4 counts as 2.
        ({"weight": "token"}, [2, 0.25, 1, 4, 0.5]),
        ({"weight": "token", "weight_cap": 2.0}, [2, 0.25, 1, 2, 0.5]),
        # IcePop: 1/4 and 4 are not within [0.5, 2], whose ends are.
        ({"weight": "token", "masks": [mask("token", 0.5, 2.0)]}, [2, 0, 1, 0, 0.5]),
        ({"masks": [mask("token", high=1.5)]}, [0, 1, 1, 0, 1]),
        # Within [0.5, 2]: 2, 1/2 are, 1/4 counts as 1/2 and 4 as 2.
        ({"weight": "token", "weight_floor": 0.5, "weight_cap": 2.0}, [2, 0.5, 1, 2, 0.5]),
        ({"weight": "seq_prod"}, [0.5, 0.5, 2, 2, 2]),
        ({"weight": "seq_prod", "weight_cap": 1.5}, [0.5, 0.5, 1.5, 1.5, 1.5]),
        ({"masks": [mask("seq_prod", high=1.9)]}, [1, 1, 0, 0, 0]),
        ({"weight": "seq_geo"}, GEO),
        ({"weight": "seq_geo", "weight_cap": 1.25}, [*GEO[:2], 1.25, 1.25, 1.25]),
        # By product 2 it would be left out; by geometric mean 1.26 it is not.
        ({"masks": [mask("seq_geo", 0.8, 1.9)]}, [0, 0, 1, 1, 1]),
        ({"weight": "token", "masks": [mask("seq_prod", 1.0)]}, [0, 0, 1, 4, 0.5]),
        # Several: the second rollout's product is 2, of the first's tokens 1/4 is too small.
        ({"masks": [mask("seq_prod", high=1.9), mask("token", 0.5)]}, [1, 0, 0, 0, 0]),
        # k2 with log 2 = 0.693147: 0.240, 0.961 | 0, 0.961, 0.240; sums 1.201 | 1.201; means 0.601 | 0.400.
        ({"masks": [mask("token_k2", high=0.5)]}, [1, 0, 1, 0, 1]),
        ({"masks": [mask("seq_sum_k2", high=1.2)]}, [0, 0, 0, 0, 0]),
        ({"masks": [mask("seq_sum_k2", high=1.202)]}, [1, 1, 1, 1, 1]),
        ({"masks": [mask("seq_mean_k2", high=0.5)]}, [0, 0, 1, 1, 1]),
        ({"masks": [mask("seq_max_k2", high=0.95)]}, [0, 0, 0, 0, 0]),
        # k3 = w - 1 - log w: 0.307, 0.636 | 0, 1.614, 0.193; sums 0.943 | 1.807; means 0.472 | 0.602.
        ({"masks": [mask("token_k3", high=0.7)]}, [1, 1, 1, 0, 1]),
        ({"masks": [mask("seq_sum_k3", high=1.0)]}, [1, 1, 0, 0, 0]),
        ({"masks": [mask("seq_mean_k3", high=0.5)]}, [1, 1, 0, 0, 0]),
        ({"masks": [mask("seq_max_k3", high=1.0)]}, [1, 1, 0, 0, 0]),
        # Mean of log engine - log trainer: 0.347 | -0.231 nats, at advantages 1 | -1: only the latter can be left out.
        ({"stray_limit_nats": -0.2}, [1, 1, 1, 1, 1]),
        ({"stray_limit_nats": -0.24}, [1, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_the_surrogate_is_multiplied_and_the_denominator_is_not(settings: dict[str, Any], factors: list[float]) -> None:
    enums = {key: RatioOf(value) if key == "weight" else value for key, value in settings.items()}
    weights, expected = torch.tensor(factors, dtype=torch.float32), -SIGNS[SAMPLED] * torch.tensor(factors)
    for old in (True, False):
        # At ratio one to the old policy, whether that was computed or is the policy itself.
        result, gradient = loss(CorrectionConfig(**enums), old=old)
        torch.testing.assert_close(gradient, expected)
        # Five tokens, masked or not.
        assert float(result.loss) == pytest.approx(float(expected.sum()) / 5, abs=1e-6)
        masked = float((weights == 0).sum())
        assert result.metrics["rollout/masked_fraction"] == Mean(masked, 5.0)
        if "weight" in settings:
            effective = result.metrics["rollout/effective_fraction"]
            assert isinstance(effective, EffectiveSize)
            assert effective.value == pytest.approx(float(weights.sum() ** 2 / weights.square().sum() / 5), abs=1e-6)


def test_decoupled_ppo_clips_the_ratio_to_the_old_policy_and_weighs_by_the_old_policys_to_the_engine() -> None:
    # The first token's ratio to the old policy is 1.5, clipped at 1.2: no gradient. The others' is 1.
    moved = OLD + torch.tensor([0.0, math.log(1.5), 0.0, 0.0, 0.0, 0.0, 0.0])
    result, gradient = loss(CorrectionConfig(weight=RatioOf.TOKEN), logprobs=moved)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.25, 1.0, 4.0, 0.5]))
    assert float(result.loss) == pytest.approx((-1.2 * 2 - 0.25 + 1 + 4 + 0.5) / 5, abs=1e-6)


def test_bypass_clips_the_ratio_to_the_engine() -> None:
    # 2 and A > 0: clipped; 1/4 and A > 0: not. 1: not. 4 and A < 0: not; 1/2 and A < 0: clipped.
    for old in (True, False):
        result, gradient = loss(CorrectionConfig(bypass=True), old=old)
        torch.testing.assert_close(gradient, torch.tensor([0.0, -0.25, 1.0, 4.0, 0.0]))
        assert result.metrics["train/clip_fraction"] == Mean(2.0, 5.0)
        # The gap is still that of trainer and engine: log 2 times 1 + 2 + 0 + 2 + 1.
        assert result.metrics["rollout/logprob_gap_mean_nats"] == MeanIfAny(pytest.approx(6 * math.log(2)), 5.0)  # type: ignore[arg-type]


def test_a_hopeless_ratio_stays_finite() -> None:
    sequences = Batch(
        token_ids=torch.zeros(3).long(),
        lengths=torch.tensor([3]),
        loss_mask=torch.tensor([False, True, True]),
        rollout_logprobs=torch.zeros(3),
        group=torch.tensor([0]),
        rewards=torch.zeros(1),
        versions=torch.zeros(3).long(),
    )
    for of in RatioOf:
        ratio = engine_ratio(torch.tensor([math.inf, 300.0, 100.0]), of, sequences)
        assert ratio.isfinite().all()
    assert engine_ratio(torch.tensor([math.nan, 0.0, 0.0]), RatioOf.SEQ_PROD, sequences).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight_cap": 2.0}, "weight_cap has no effect with weight=none, got 2.0"),
        ({"weight": RatioOf.TOKEN, "weight_cap": 0.0}, "weight_cap must be above 0, got 0.0"),
        ({"weight": RatioOf.TOKEN, "weight_cap": math.inf}, "weight_cap must be at most 1000000000.0, got inf"),
        ({"weight": RatioOf.TOKEN, "weight_floor": math.nan}, "weight_floor must be at least 0, got nan"),
        ({"weight_floor": 0.5}, "weight_floor has no effect with weight=none, got 0.5"),
        ({"normalize_weights": True}, "normalize_weights has no effect with weight=none, got true"),
        (
            {"weight": RatioOf.TOKEN, "weight_floor": 2.0, "weight_cap": 1.0},
            "weight_floor must be below weight_cap=1.0, got 2.0",
        ),
        (
            {"masks": [mask("token", 1.0), mask("token", 2.0)]},
            "masks must .* got token, token; join",
        ),
        ({"bypass": True, "weight": RatioOf.TOKEN}, "weight must be none with bypass, .* got token; .*name=cispo"),
    ],
)
def test_corrections_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**wrong)


@pytest.mark.parametrize(
    ("of", "bounds", "message"),
    [
        ("token", {}, "of=token needs low or high, such as 0.5 and 5, got none"),
        ("token", {"low": -1.0}, "low must be at least 0, got -1.0"),
        ("seq_geo", {"low": 2.0, "high": 1.0}, "low must be below high=1.0, got 2.0"),
        ("seq_geo", {"high": math.nan}, "high must be at least 0, got nan"),
        ("seq_max_k3", {"low": 1.0}, "low has no effect with of=seq_max_k3, which is a distance, got 1.0"),
        ("token_k2", {}, "of=token_k2 needs high, in nats, got none"),
    ],
)
def test_masks_that_cannot_work_are_refused(of: str, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask(of, **bounds)


def test_bypass_with_a_mask_compares_the_policy_of_the_moment_with_the_engine() -> None:
    # The policy has moved by e^0.5 on the first token: its ratio to the engine is 3.30, that before the update 2.
    moved = OLD + torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    both = CorrectionConfig(bypass=True, masks=[mask("token", high=3.0)])
    for old in (True, False):
        result, gradient = loss(both, old=old, logprobs=moved)
        # The first token and that at 4 are left out; 1/4 and A > 0 is not clipped, 1/2 and A < 0 is.
        torch.testing.assert_close(gradient, torch.tensor([0.0, -0.25, 1.0, 0.0, 0.0]))
        assert result.metrics["rollout/masked_fraction"] == Mean(2.0, 5.0)


@pytest.mark.parametrize(
    ("settings", "mean"),
    [
        # (2 + 1/4 + 1 + 4 + 1/2) / 5, and with 4 left out (2 + 1/4 + 1 + 1/2) / 5: over the same tokens.
        ({"weight": RatioOf.TOKEN}, 1.55),
        ({"weight": RatioOf.TOKEN, "masks": [mask("token", high=3.0)]}, 0.75),
        # Products 1/2 and 2, and geometric means, over two sequences.
        ({"weight": RatioOf.SEQ_PROD}, 1.25),
        ({"weight": RatioOf.SEQ_GEO}, (2**-0.5 + 2 ** (1 / 3)) / 2),
    ],
    ids=str,
)
def test_normalised_weights_have_a_mean_of_one(settings: dict[str, Any], mean: float) -> None:
    plain = Grpo(GrpoConfig(correction=CorrectionConfig(**settings))).train_batch(rollouts())
    scaled = Grpo(GrpoConfig(correction=CorrectionConfig(**settings, normalize_weights=True))).train_batch(rollouts())
    torch.testing.assert_close(scaled.advantages, plain.advantages / mean)


def test_an_adaptive_coefficient_moves_and_comes_back_from_a_checkpoint() -> None:
    config = GrpoConfig(kl_coefficient=0.5, adaptive_kl=AdaptiveKlConfig(target_nats=0.1))
    algorithm, resumed = Grpo(config), Grpo(config)
    # Twice the target counts as an error of 0.2, a tenth of which is 2 %.
    assert algorithm.adapt({"train/kl_nats": 0.2}) == {"train/kl_coefficient": 0.5}
    assert algorithm.adapt({"train/kl_nats": 0.1}) == {"train/kl_coefficient": pytest.approx(0.51)}
    resumed.restore(algorithm.state())
    assert resumed.kl_coefficient == algorithm.kl_coefficient == pytest.approx(0.51)
    # A step without a token in the loss has no KL.
    assert resumed.adapt({}) == {"train/kl_coefficient": pytest.approx(0.51)}
    assert resumed.kl_coefficient == algorithm.kl_coefficient
    fixed = Grpo(GrpoConfig(kl_coefficient=0.5))
    fixed.adapt({"train/kl_nats": 9.0})
    assert fixed.kl_coefficient == 0.5 and Grpo(GrpoConfig()).adapt({}) == {}


def test_a_step_without_a_token_in_the_loss_has_no_kl_and_no_gap() -> None:
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.5))
    data = replace(rollouts(), reference_logprobs=torch.ones(7))
    data = algorithm.train_batch(replace(data, loss_mask=torch.zeros_like(data.loss_mask)))
    policy = PolicyOutput(logprobs=torch.zeros(data.num_tokens), entropy=torch.zeros(data.num_tokens))
    metrics = merge([algorithm.loss(policy, data, algorithm.token_weights(data)).metrics])
    gap = {"rollout/logprob_gap_mean_nats", "rollout/logprob_gap_max_nats", "rollout/engine_kl_k3_nats"}
    assert "train/loss" in metrics and not metrics.keys() & {"train/kl_nats", *gap}


def test_the_loss_has_the_coefficient_of_the_moment() -> None:
    algorithm = Grpo(
        GrpoConfig(kl_coefficient=0.5, kl_estimator=KlEstimator.K1, adaptive_kl=AdaptiveKlConfig(target_nats=1.0))
    )
    batch = Batch(
        token_ids=torch.zeros(4).long(),
        lengths=torch.tensor([2, 2]),
        loss_mask=torch.tensor([False, True, False, True]),
        rollout_logprobs=torch.zeros(4),
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 1.0]),
        versions=torch.zeros(4).long(),
        reference_logprobs=torch.full((4,), -2.0),
    )
    data, policy = batch.with_advantages(torch.zeros(4)), PolicyOutput(logprobs=torch.zeros(4), entropy=torch.zeros(4))
    # k1 is 2 everywhere.
    assert float(algorithm.loss(policy, data, algorithm.token_weights(data)).loss) == pytest.approx(1.0)
    algorithm.restore({"kl_coefficient": 0.75})
    assert float(algorithm.loss(policy, data, algorithm.token_weights(data)).loss) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (
            GrpoConfig,
            {"adaptive_kl": AdaptiveKlConfig(target_nats=1.0)},
            "kl_coefficient must be above 0 with adaptive_kl",
        ),
        (GrpoConfig, {"dual_clip": 3.0, "ratio_cap": 2.0}, "ratio_cap and dual_clip bound the same ratio, got 2.0"),
        (GrpoConfig, {"kl_estimator": KlEstimator.K1}, "kl_estimator has no effect with kl_coefficient=0, got k1"),
        (GrpoConfig, {"kl_in_reward": True}, "kl_in_reward has no effect with kl_coefficient=0, got true"),
        (GrpoConfig, {"kl_cap": 10.0}, "kl_cap has no effect with kl_coefficient=0, got 10.0"),
        (RlooConfig, {"kl_in_reward": False}, "kl_in_reward has no effect with kl_coefficient=0, got false"),
        (
            GrpoConfig,
            {"kl_coefficient": 0.1, "kl_cap": 10.0, "kl_estimator": KlEstimator.K2},
            "kl_cap has no effect with kl_estimator=k2, got 10.0",
        ),
        (
            GrpoConfig,
            {"kl_coefficient": 0.1, "kl_in_reward": True, "normalize_by": NormalizeBy.PART_STD},
            "kl_in_reward has no effect with normalize_by=part_std",
        ),
        *(
            (GrpoConfig, {name: value}, f"{name} must be .*, got")
            for name in ("kl_coefficient", "entropy_coefficient", "distillation_coefficient", "clip_low", "clip_high")
            for value in (math.nan, math.inf, -math.inf, 1e300)
        ),
        (GrpoConfig, {"dual_clip": 1.2}, "dual_clip must be above 1 \\+ clip_high=1.2, or null for none, got 1.2"),
        (AdaptiveKlConfig, {"target_nats": 0.0}, "target_nats must be above 0, got 0.0"),
        (AdaptiveKlConfig, {"target_nats": 1.0, "gain": 2.0}, "gain must be at most 1, got 2.0"),
        (
            RlooConfig,
            {"kl_coefficient": 0.1, "kl_estimator": KlEstimator.K3_PLUS},
            "kl_estimator=k3_plus has no effect in the reward, where rloo",
        ),
    ],
)
def test_kl_settings_that_cannot_work_are_refused(config: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)
