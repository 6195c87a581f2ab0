"""From rewards to advantages: what they are divided by, who is left out, where the KL comes off; worked by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe.algorithms.dynamic_sampling import Flat, flat
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.gspo import Gspo, GspoConfig
from rlframe.algorithms.on_policy_distillation import OnPolicyDistillation, OnPolicyDistillationConfig
from rlframe.algorithms.policy_gradient import PolicyGradient
from rlframe.algorithms.ppo import Ppo, PpoConfig
from rlframe.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlframe.algorithms.rloo import Rloo, RlooConfig
from rlframe.loops.reporting.metrics import rollout_metrics
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.kl import KlEstimator
from rlframe.ops.packing import pack
from rlframe.types.batch import Batch
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Group, Rollout

NAN = math.nan


def batch(rewards: list[float], **fields: Tensor) -> Batch:
    """Rollouts in groups of three, each one token of a prompt and one sampled."""
    count = len(rewards)
    return Batch(
        token_ids=torch.arange(2 * count),
        lengths=torch.full((count,), 2),
        loss_mask=torch.tensor([False, True] * count),
        rollout_logprobs=torch.zeros(2 * count),
        group=torch.arange(count) // 3,
        rewards=torch.tensor(rewards),
        versions=torch.zeros(2 * count, dtype=torch.int64),
        **fields,
    )


def rollout(**fields: Any) -> Rollout:
    """One of a token of a prompt and a token sampled."""
    return Rollout(
        prompt=Prompt(id="0", text="?", input=ModelInput((3,))),
        sample_index=0,
        input=ModelInput([3, 4]),
        loss_mask=[False, True],
        rollout_logprobs=[0.0, -1.0],
        versions=[-1, 0],
        finish_reason=FinishReason.STOP,
        **fields,
    )


def of_rollouts(algorithm: PolicyGradient, data: Batch) -> list[float]:
    """The advantage of each rollout's sampled token."""
    advantages = algorithm.train_batch(data).advantages
    assert not advantages[0::2].any()
    return advantages[1::2].tolist()


def near(values: list[float]) -> Any:
    """Equal but for rounding and the 1e-6 beside the standard deviation."""
    return pytest.approx(values, abs=1e-5)


REWARDS = [0.0, 3.0, 6.0, 1.0, 1.0, 1.0]
"""Group means 3 and 1; the standard deviation of the first group is 3."""


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (NormalizeBy.NONE, [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0]),
        (NormalizeBy.GROUP_STD, [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        # All six: mean 2, squares 4 + 1 + 16 + 1 + 1 + 1 = 24, variance 24 / 5 = 4.8, standard deviation 2.190890.
        (NormalizeBy.BATCH_STD, [-1.369306, 0.0, 1.369306, 0.0, 0.0, 0.0]),
    ],
)
def test_what_rewards_less_their_mean_are_divided_by(by: NormalizeBy, expected: list[float]) -> None:
    for algorithm in (Grpo(GrpoConfig(normalize_by=by)), Gspo(GspoConfig(normalize_by=by))):
        assert of_rollouts(algorithm, batch(REWARDS)) == near(expected)
    scaled = OnPolicyDistillationConfig(group_size=3, reward_coefficient=0.5, normalize_by=by)
    data = batch(REWARDS, teacher_logprobs=torch.zeros(12))
    assert of_rollouts(OnPolicyDistillation(scaled), data) == near([value / 2 for value in expected])


def test_parts_are_divided_by_their_own_deviation_and_their_sum_by_the_batchs() -> None:
    # Part 0: 0, 100, 200 | 1, 1, 1, in its groups -1, 0, 1 | 0, 0, 0. Part 1: 0, 0, 3 | 2, 4, 6, mean 1 and deviation
    # sqrt((1 + 1 + 4) / 2) = 1.732051: -0.577350, -0.577350, 1.154701 | -1, 0, 1. Weights 1 and -2: -1 + 1.154701 =
    # 0.154701, 1.154701, 1 - 2.309401 = -1.309401 | 2, 0, -2. Squares 0.023932 + 1.333333 + 1.714531 + 8 = 11.071797,
    # over 5 and rooted 1.488072. Taken together, part 0 alone would decide the first group.
    parts = torch.tensor([[0.0, 0.0], [100.0, 0.0], [200.0, 3.0], [1.0, 2.0], [1.0, 4.0], [1.0, 6.0]])
    weights = torch.tensor([1.0, -2.0]).expand(6, -1)
    algorithm = Grpo(GrpoConfig(normalize_by=NormalizeBy.PART_STD))
    data = batch((parts * weights).sum(1).tolist(), reward_parts=parts, part_weights=weights)
    sums = torch.tensor([0.154701, 1.154701, -1.309401, 2.0, 0.0, -2.0])
    assert of_rollouts(algorithm, data) == near((sums / 1.488072).tolist())


def test_a_part_without_a_say_on_a_rollout_leaves_it_out_of_that_parts_group_only() -> None:
    # Part 0: -1, 0, 1. Part 1 of the first two only, 0 and 2: deviation 1.414214, so -+0.707107. Sums -1.707107,
    # 0.707107, 1: squares 2.914214 + 0.5 + 1 = 4.414214, over 2 and rooted 1.485634.
    parts = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, NAN]])
    data = batch([0.0, 3.0, 2.0], reward_parts=parts, part_weights=torch.ones(3, 2))
    expected = (torch.tensor([-1.707107, 0.707107, 1.0]) / 1.485634).tolist()
    assert of_rollouts(Grpo(GrpoConfig(normalize_by=NormalizeBy.PART_STD)), data) == near(expected)


def test_packing_takes_the_parts_and_their_weights_along() -> None:
    weights = {"math": 1.0, "length": -0.5}
    both, one = {"math": 1.0, "length": 4.0}, {"length": 2.0}
    rollouts = [rollout(reward_parts=parts, reward_weights=weights) for parts in (both, one)]
    packed = pack([Group(id="a", prompt=rollouts[0].prompt, rollouts=rollouts)])
    assert packed.reward_parts is not None and packed.part_weights is not None
    torch.testing.assert_close(packed.reward_parts, torch.tensor([[1.0, 4.0], [NAN, 2.0]]), equal_nan=True)
    assert packed.part_weights.tolist() == [[1.0, -0.5]] * 2
    chosen = packed.select([1])
    assert chosen.reward_parts is not None and chosen.reward_parts.shape == (1, 2)


UNSCORED = [0.0, NAN, 6.0, NAN, NAN, NAN]
"""The first group's mean is 3 over two rollouts, its standard deviation 4.242641; the second has no reward."""


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Grpo(GrpoConfig(normalize_by=NormalizeBy.NONE)), 3.0),
        (Grpo(GrpoConfig()), 0.707107),
        # The batch's deviation is over the two rewards that there are.
        (Grpo(GrpoConfig(normalize_by=NormalizeBy.BATCH_STD)), 0.707107),
        # The mean of the others is the other's reward.
        (Rloo(RlooConfig()), 6.0),
        # -6 and 6: mean 0, deviation 8.485281.
        (Rloo(RlooConfig(normalize_advantages=True)), 0.707107),
        # Whitened over two tokens, not six.
        (ReinforcePlusPlus(ReinforcePlusPlusConfig()), 0.707107),
        (ReinforcePlusPlus(ReinforcePlusPlusConfig(group_baseline=True)), 0.707107),
    ],
    ids=lambda value: value.config.name if isinstance(value, PolicyGradient) else "",
)
def test_a_rollout_without_a_reward_has_no_advantage_and_no_part_in_the_others(
    algorithm: PolicyGradient, expected: float
) -> None:
    assert of_rollouts(algorithm, batch(UNSCORED)) == near([-expected, 0.0, expected, 0.0, 0.0, 0.0])
    assert of_rollouts(algorithm, batch([NAN] * 3)) == [0.0] * 3


def test_the_critic_is_told_what_it_says_of_a_rollout_without_a_reward() -> None:
    algorithm = Ppo(PpoConfig(whiten_advantages=False))
    # Values of the states before the sampled tokens: what is said at the prompts' tokens.
    data = algorithm.with_values(batch([0.0, NAN, 6.0]), torch.tensor([1.0, 9, 2.0, 9, 3.0, 9])[:, None])
    assert data.returns is not None and data.returns.tolist() == [0.0, 0.0, 0.0, 2.0, 0.0, 6.0]
    assert of_rollouts(algorithm, data) == [-1.0, 0.0, 3.0]


def test_a_group_is_flat_by_the_rewards_that_it_has() -> None:
    def group(*rewards: float, **fields: Any) -> list[Rollout]:
        return [rollout(reward=reward, **fields) for reward in rewards]

    assert flat(group(1.0, NAN, 0.0), None) is None
    assert flat(group(1.0, NAN, 1.0), None) is Flat.ALL_RIGHT
    assert flat(group(NAN, NAN), None) is Flat.UNSCORED
    # The part that must differ had no say, whatever the sum is.
    assert flat(group(1.0, 0.0, reward_parts={"length": 1.0}), "math") is Flat.UNSCORED
    # Attempts of two sequences with a reward at a token of the second one.
    first, second = rollout(sequence=0), rollout(sequence=1, token_rewards=np.array([0.0, 1.0]))
    assert flat([first, second, first, second], None) is Flat.ALL_RIGHT
    assert flat([first, second, first, rollout(sequence=1)], None) is None


def test_a_group_whose_rewards_differ_in_the_rounding_of_their_sums_alone_is_flat() -> None:
    rewards = [0.1 + 0.2, 0.3]
    assert rewards[0] != rewards[1]
    rollouts = [rollout(reward=reward) for reward in rewards]
    groups = [Group(id="0", prompt=rollouts[0].prompt, rollouts=rollouts)]
    assert of_rollouts(Grpo(GrpoConfig(group_size=2)), pack(groups)) == [0.0, 0.0]
    assert flat(rollouts, None) is Flat.OTHER
    assert rollout_metrics(groups)["reward/flat_groups_fraction"] == 1.0
    nearly = 0.7 + 0.2 + 0.1
    assert nearly < 1
    assert flat([rollout(reward=nearly), rollout(reward=1.0)], None) is Flat.ALL_RIGHT


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K2])
def test_with_kl_in_reward_the_rollouts_kl_comes_off_before_the_baseline(estimator: KlEstimator) -> None:
    settings = {"kl_coefficient": 0.5, "kl_in_reward": True, "kl_estimator": estimator}
    algorithm = Grpo(GrpoConfig(**settings, normalize_by=NormalizeBy.NONE))
    # d = 0, 2, 4 nats: k1 costs 0, 1, 2 and k2 0, 1, 4. Rewards 0, 2, 4 with mean 2; or 0, 2, 2 with mean 4/3.
    reference = -torch.tensor([9.0, 0.0, 9.0, 2.0, 9.0, 4.0])
    expected = [-2.0, 0.0, 2.0] if estimator is KlEstimator.K1 else [-4 / 3, 2 / 3, 2 / 3]
    data = batch([0.0, 3.0, 6.0], reference_logprobs=reference)
    assert of_rollouts(algorithm, data) == near(expected)


def test_without_kl_in_reward_rloos_kl_is_in_the_loss() -> None:
    algorithm = Rloo(RlooConfig(kl_coefficient=0.5, kl_in_reward=False))
    reference = -torch.tensor([9.0, 0.0, 9.0, 2.0, 9.0, 4.0])
    data = batch([0.0, 3.0, 6.0], reference_logprobs=reference)
    assert of_rollouts(algorithm, data) == near([-4.5, 0.0, 4.5])
