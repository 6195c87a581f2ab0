"""Corrections between engine and trainer, worked by hand, and what their config refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.correction import CorrectionConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.policy_gradient import AdaptiveKlConfig
from rlframe.algorithms.rloo import RlooConfig
from rlframe.ops.correction import RatioOf, engine_ratio
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch, TrainBatch
from rlframe.types.results import EffectiveSize, LossOutput, Mean, PolicyOutput

OLD = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -1.0, -2.0])
SAMPLED = [1, 2, 4, 5, 6]
RATIOS = torch.tensor([9.0, 2.0, 0.25, 9.0, 1.0, 4.0, 0.5])
"""Trainer / engine: 2, 1/4 | 1, 4, 1/2. Products 1/2 and 2; geometric means 1/sqrt(2) and the cube root of 2."""
SIGNS = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0, -1.0, -1.0])
GEO = [2**-0.5] * 2 + [2 ** (1 / 3)] * 3


def loss(correction: CorrectionConfig, *, old: bool = True, logprobs: Tensor = OLD) -> tuple[LossOutput, Tensor]:
    """The loss of two rollouts of one prompt at rewards 1 and 0 (advantages 1 and -1 over 5 tokens), and 5 times its
    gradient by the sampled tokens' logprobs."""
    algorithm = Grpo(GrpoConfig(correction=correction))
    data = Batch(
        token_ids=torch.zeros(7).long(),
        lengths=torch.tensor([3, 4]),
        loss_mask=torch.tensor([False, True, True, False, True, True, True]),
        rollout_logprobs=OLD - RATIOS.log(),
        group=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0]),
        versions=torch.tensor([0, 0]),
        old_logprobs=OLD if old else None,
    )
    batch: TrainBatch = data.with_advantages(SIGNS)
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
        ({"weight": "token", "mask": "token", "mask_low": 0.5, "mask_high": 2.0}, [2, 0, 1, 0, 0.5]),
        ({"mask": "token", "mask_high": 1.5}, [0, 1, 1, 0, 1]),
        ({"weight": "seq_prod"}, [0.5, 0.5, 2, 2, 2]),
        ({"weight": "seq_prod", "weight_cap": 1.5}, [0.5, 0.5, 1.5, 1.5, 1.5]),
        ({"mask": "seq_prod", "mask_high": 1.9}, [1, 1, 0, 0, 0]),
        ({"weight": "seq_geo"}, GEO),
        ({"weight": "seq_geo", "weight_cap": 1.25}, [*GEO[:2], 1.25, 1.25, 1.25]),
        # By product 2 it would be left out; by geometric mean 1.26 it is not.
        ({"mask": "seq_geo", "mask_low": 0.8, "mask_high": 1.9}, [0, 0, 1, 1, 1]),
        ({"weight": "token", "mask": "seq_prod", "mask_low": 1.0}, [0, 0, 1, 4, 0.5]),
    ],
    ids=str,
)
def test_the_surrogate_is_multiplied_and_the_denominator_is_not(settings: dict[str, Any], factors: list[float]) -> None:
    enums = {key: RatioOf(value) if isinstance(value, str) else value for key, value in settings.items()}
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
        assert result.metrics["rollout/logprob_gap_mean_nats"] == Mean(pytest.approx(6 * math.log(2)), 5.0)  # type: ignore[arg-type]


def test_a_hopeless_ratio_stays_finite() -> None:
    sequences = Batch(
        token_ids=torch.zeros(3).long(),
        lengths=torch.tensor([3]),
        loss_mask=torch.tensor([False, True, True]),
        rollout_logprobs=torch.zeros(3),
        group=torch.tensor([0]),
        rewards=torch.zeros(1),
        versions=torch.tensor([0]),
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
        ({"mask_high": 2.0}, "mask_high has no effect with mask=none, got 2.0"),
        ({"mask": RatioOf.TOKEN}, "mask=token needs mask_low or mask_high"),
        ({"mask": RatioOf.TOKEN, "mask_low": -1.0}, "mask_low must be at least 0, got -1.0"),
        ({"mask": RatioOf.SEQ_GEO, "mask_low": 2.0, "mask_high": 1.0}, "mask_low must be below mask_high=1.0, got 2.0"),
        ({"bypass": True, "weight": RatioOf.TOKEN}, "bypass makes the old policy the engine's"),
    ],
)
def test_corrections_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**wrong)


def test_an_adaptive_coefficient_moves_and_comes_back_from_a_checkpoint() -> None:
    config = GrpoConfig(kl_coefficient=0.5, adaptive_kl=AdaptiveKlConfig(target_nats=0.1))
    algorithm, resumed = Grpo(config), Grpo(config)
    # Twice the target counts as an error of 0.2, a tenth of which is 2 %.
    assert algorithm.adapt({"train/kl_nats": 0.2}) == {"train/kl_coefficient": 0.5}
    assert algorithm.adapt({"train/kl_nats": 0.1}) == {"train/kl_coefficient": pytest.approx(0.51)}
    resumed.restore(algorithm.state())
    assert resumed.kl_coefficient == algorithm.kl_coefficient == pytest.approx(0.51)
    fixed = Grpo(GrpoConfig(kl_coefficient=0.5))
    fixed.adapt({"train/kl_nats": 9.0})
    assert fixed.kl_coefficient == 0.5 and Grpo(GrpoConfig()).adapt({}) == {}


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
        versions=torch.tensor([0, 0]),
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
        (GrpoConfig, {"dual_clip": 1.2}, "dual_clip must be above 1 \\+ clip_high=1.2, or null for none, got 1.2"),
        (AdaptiveKlConfig, {"target_nats": 0.0}, "target_nats must be above 0, got 0.0"),
        (AdaptiveKlConfig, {"target_nats": 1.0, "gain": 2.0}, r"gain must lie in \(0, 1\], got 2.0"),
        (
            RlooConfig,
            {"kl_estimator": KlEstimator.K3_PLUS},
            "kl_estimator=k3_plus has no effect in the reward, where rloo",
        ),
    ],
)
def test_kl_settings_that_cannot_work_are_refused(config: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)
