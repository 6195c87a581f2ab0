"""Rewards at single tokens: from the environment through packing to the advantages; worked by hand."""

import numpy as np
import pytest
import torch

from rlframe.algorithms.dynamic_sampling import flat
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.ppo import Ppo, PpoConfig
from rlframe.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlframe.loops.reporting.metrics import rollout_metrics
from rlframe.ops.advantages import NormalizeBy, whiten
from rlframe.ops.packing import pack
from rlframe.types.batch import Batch
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, Group, Rollout

PROMPT = Prompt(id="0", text="?", input=ModelInput(np.array([3])))


def attempt(*turns: tuple[int, float], reward: float) -> Rollout:
    """An attempt of turns of (tokens, reward of the turn), with an observed token between them."""
    rollout = Rollout.begin(PROMPT, 0)
    for place, (length, credit) in enumerate(turns):
        if place:
            rollout.observe([9])
        ids, nats, versions = np.full(length, 5), np.full(length, -1.0), np.zeros(length)
        rollout.append(Completion(token_ids=ids, logprobs=nats, versions=versions, finish_reason=FinishReason.STOP))
        if credit:
            rollout.credit(credit)
    rollout.reward = reward
    return rollout


def batch(*, part_std: bool = False) -> Batch:
    """p | a b o c with 1 at b and 4 for all of it; p | d with -2 at d; p | e with 6 for all of it."""
    rollouts = [attempt((2, 1.0), (1, 0.0), reward=4.0), attempt((1, -2.0), reward=0.0), attempt((1, 0.0), reward=6.0)]
    if part_std:
        for rollout in rollouts:
            rollout.reward_parts, rollout.reward_weights = {"all": rollout.reward}, {"all": 1.0}
    return pack([Group(id="0", prompt=PROMPT, rollouts=rollouts)])


def test_a_turns_reward_lies_on_the_last_token_that_was_sampled_by_then():
    made = batch()
    assert made.loss_mask.int().tolist() == [0, 1, 1, 0, 1, 0, 1, 0, 1]
    assert made.token_rewards is not None
    assert made.token_rewards.tolist() == [0, 0, 1, 0, 0, 0, -2, 0, 0]
    assert made.rewards.tolist() == [4, 0, 6]
    halves = made.select([1]), made.select([2, 0])
    assert [half.token_rewards.tolist() for half in halves] == [[0, -2], [0, 0, 0, 0, 1, 0, 0]]
    assert pack([Group(id="0", prompt=PROMPT, rollouts=[attempt((2, 0.0), reward=4.0)])]).token_rewards is None


def test_two_credits_of_one_turn_add_up():
    rollout = attempt((2, 1.0), reward=0.5)
    assert rollout.token_rewards is not None
    # As arrays are that have come from another process.
    rollout.token_rewards.flags.writeable = False
    rollout.credit(2.0)
    assert rollout.token_rewards.tolist() == [0, 0, 3]
    assert rollout.total_reward == 3.5


def test_a_group_compares_what_attempts_earned_in_all():
    # 4 + 1, 0 - 2 and 6: mean 3, so 2, -5 and 3.
    advantages = Grpo(GrpoConfig(normalize_by=NormalizeBy.NONE)).train_batch(batch()).advantages
    assert advantages.tolist() == [0, 2, 2, 0, 2, 0, -5, 0, 3]


def test_rewards_at_tokens_are_a_part_of_weight_1_where_parts_are_normalised():
    # "all": 4, 0, 6, mean 10 / 3, deviation 3.055050: 0.218218, -1.091089, 0.872872. At tokens: 1, -2, 0, mean -1 / 3,
    # deviation 1.527525: 0.872872, -1.091089, 0.218218. Sums 1.091089, -2.182179, 1.091089, over
    # their deviation 1.889822.
    advantages = Grpo(GrpoConfig(normalize_by=NormalizeBy.PART_STD)).train_batch(batch(part_std=True)).advantages
    assert advantages[[1, 6, 8]].tolist() == pytest.approx([0.577350, -1.154701, 0.577350], abs=1e-5)


def test_without_any_reward_there_are_no_parts_to_normalise():
    nothing = pack([Group(id="0", prompt=PROMPT, rollouts=[attempt((1, 0.0), reward=0.0) for _ in range(2)])])
    algorithm = Grpo(GrpoConfig(normalize_by=NormalizeBy.PART_STD))
    assert algorithm.train_batch(nothing).advantages.tolist() == [0.0] * 4


def test_returns_go_backwards_from_each_reward():
    # discount 0.5: c 4, b 1 + 2 = 3, a 1.5; d -2; e 6.
    returns = torch.tensor([0, 1.5, 3, 0, 4, 0, -2, 0, 6])
    made = batch()
    algorithm = ReinforcePlusPlus(ReinforcePlusPlusConfig(discount=0.5))
    assert torch.equal(algorithm.train_batch(made).advantages, whiten(returns, made.loss_mask))


def test_the_critics_target_holds_them():
    # With gae_lambda 1 and values 0 the returns are the discounted rewards.
    config = PpoConfig(discount=0.5, gae_lambda=1.0, whiten_advantages=False)
    made = Ppo(config).with_values(batch(), torch.zeros(9, 1))
    assert made.returns is not None
    assert made.returns.tolist() == [0, 1.5, 3, 0, 4, 0, -2, 0, 6]


def test_groups_that_differ_in_them_alone_have_a_signal():
    same, other = attempt((1, 0.0), reward=1.0), attempt((1, 1.0), reward=0.0)
    assert flat([same, other], None) == "all_right"
    other.credit(0.5)
    assert flat([same, other], None) is None


def test_metrics_are_of_all_that_was_earned():
    metrics = rollout_metrics([Group(id="0", prompt=PROMPT, rollouts=[attempt((1, 1.0), reward=4.0)] * 2)])
    assert (metrics["reward/mean"], metrics["reward/at_tokens_mean"]) == (5.0, 1.0)
