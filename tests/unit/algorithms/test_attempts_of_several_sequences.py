"""An attempt of several sequences counts once in its group, and each of its tokens gets the attempt's advantage."""

import math

import pytest
import torch

from rlframe.algorithms.credit import Credit, CreditConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.policy_gradient import PolicyGradient
from rlframe.algorithms.ppo import Ppo, PpoConfig
from rlframe.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlframe.algorithms.rloo import Rloo, RlooConfig
from rlframe.ops.advantages import NormalizeBy, rewards_by_token, whiten
from rlframe.ops.packing import pack
from rlframe.types.batch import Batch
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, Group, Rollout

PROMPT = Prompt(id="p", text="", input=ModelInput((1, 2)))


def sequence(sample_index: int, number: int, reward: float, *, turn: float = 0.0) -> Rollout:
    """A sequence with a response of two tokens, the reward of its attempt, and one of its own turn."""
    rollout = Rollout.begin(PROMPT, sample_index)
    rollout.sequence = number
    rollout.append(
        Completion(token_ids=[5, 6], logprobs=[-1.0, -1.0], versions=[0, 0], finish_reason=FinishReason.STOP)
    )
    rollout.reward, rollout.reward_parts, rollout.reward_weights = reward, {"part": reward}, {"part": 1.0}
    if turn:
        rollout.credit(turn)
    return rollout


def batch(*sequences: Rollout) -> Batch:
    return pack([Group(id="g", prompt=PROMPT, rollouts=list(sequences))])


def by_sequence(advantages: torch.Tensor) -> list[float]:
    """The advantage of the last token of each sequence of four tokens."""
    return [round(value, 4) for value in advantages.view(-1, 4)[:, -1].tolist()]


def test_an_attempt_counts_once_in_the_baseline() -> None:
    packed = batch(sequence(0, 0, 1.0), sequence(0, 1, 1.0), sequence(1, 0, 0.0), sequence(2, 0, 0.0))
    assert packed.attempt is not None and packed.attempt.tolist() == [0, 0, 1, 2]
    # Three attempts of rewards 1, 0, 0: the mean is 1/3. Four sequences would have a mean of 1/2.
    grpo = Grpo(GrpoConfig(normalize_by=NormalizeBy.NONE))
    assert by_sequence(grpo.advantages(packed)) == [0.6667, 0.6667, -0.3333, -0.3333]
    # Leave one out: 1 - 0, and 0 - 1/2.
    assert by_sequence(Rloo(RlooConfig()).advantages(packed)) == [1.0, 1.0, -0.5, -0.5]


@pytest.mark.parametrize("by", NormalizeBy)
def test_attempts_of_one_sequence_are_as_before(by: NormalizeBy) -> None:
    packed = batch(*(sequence(index, 0, reward) for index, reward in enumerate((1.0, 0.0, 3.0))))
    assert packed.attempt is None
    numbered = batch(*(sequence(index, 0, reward) for index, reward in enumerate((1.0, 0.0, 3.0))))
    numbered.attempt = torch.arange(3)
    grpo = Grpo(GrpoConfig(normalize_by=by))
    assert torch.equal(grpo.advantages(packed), grpo.advantages(numbered))


def test_rewards_of_turns_in_other_sequences_count_for_the_attempt() -> None:
    packed = batch(sequence(0, 0, 1.0, turn=2.0), sequence(0, 1, 1.0, turn=3.0), sequence(1, 0, 2.0))
    # Attempts: 1 + 2 + 3 = 6, and 2; the mean is 4.
    grpo = Grpo(GrpoConfig(normalize_by=NormalizeBy.NONE))
    assert by_sequence(grpo.advantages(packed)) == [2.0, 2.0, -2.0]


def test_returns_of_a_sequence_have_what_its_attempt_earned_later() -> None:
    packed = batch(
        *(sequence(0, number, 1.0, turn=turn) for number, turn in enumerate((2.0, 3.0, 0.0))), sequence(1, 0, 2.0)
    )
    # At the last tokens: 2 + 1 + 3, 3 + 1, 1, and 2 for the attempt of one sequence; half of that one token before.
    ends = [6.0, 4.0, 1.0, 2.0]
    expected = [number for end in ends for number in (0.0, 0.0, end / 2, end)]
    with_values = Ppo(PpoConfig(discount=0.5)).with_values(packed, torch.zeros(packed.num_tokens, 1))
    assert with_values.returns is not None and with_values.returns.tolist() == expected
    advantages = ReinforcePlusPlus(ReinforcePlusPlusConfig(discount=0.5)).advantages(packed)
    assert torch.equal(advantages, whiten(torch.tensor(expected), packed.loss_mask))
    # A sequence whose tokens are not in the loss has still earned.
    packed.loss_mask[4:8] = False
    assert rewards_by_token(packed).view(4, 4)[:, 3].tolist() == [6.0, 3.0, 1.0, 2.0]


def test_nothing_stands_for_the_rest_of_an_attempt_that_went_on() -> None:
    # An agent may go on, in another sequence, after a response that was cut off: the first one's last, and the last.
    cut, last, alone = sequence(0, 0, 1.0, turn=2.0), sequence(0, 1, 1.0, turn=3.0), sequence(1, 0, 2.0)
    for each in (cut, alone):
        each.finish_reason = FinishReason.LENGTH
    packed = batch(cut, last, alone)
    ppo = Ppo(PpoConfig(bootstrap_truncated=True))
    returns = ppo.with_values(packed, torch.full((packed.num_tokens, 1), 8.0)).returns
    # 2 + 1 + 3 of what it earned, 3 + 1, and of the attempt that ended there 2 and the critic's 8.
    assert returns is not None and returns.view(3, 4)[:, 3].tolist() == [6.0, 4.0, 10.0]


def test_a_reward_of_the_environment_at_the_end_is_worth_that_of_a_reward_function() -> None:
    scored = batch(sequence(0, 0, 1.0), sequence(0, 1, 1.0), sequence(1, 0, 0.0))
    credited = batch(sequence(0, 0, 0.0), sequence(0, 1, 0.0, turn=1.0), sequence(1, 0, 0.0))
    for config in (ReinforcePlusPlusConfig(discount=0.9), ReinforcePlusPlusConfig(group_baseline=True)):
        algorithm = ReinforcePlusPlus(config)
        assert torch.equal(algorithm.advantages(scored), algorithm.advantages(credited))


@pytest.mark.parametrize(
    "algorithm",
    [
        *(Grpo(GrpoConfig(normalize_by=by)) for by in NormalizeBy),
        Grpo(GrpoConfig(credit=CreditConfig(by=Credit.TURN))),
        Rloo(RlooConfig()),
        ReinforcePlusPlus(ReinforcePlusPlusConfig(group_baseline=True)),
    ],
    ids=lambda algorithm: algorithm.config.name,
)
def test_a_step_that_nothing_scored_has_no_signal(algorithm: PolicyGradient) -> None:
    packed = batch(*(sequence(index, number, math.nan) for index, number in ((0, 0), (0, 1), (1, 0))))
    assert algorithm.train_batch(packed).advantages.tolist() == [0.0] * packed.num_tokens


def test_a_group_out_of_order_or_cut_is_understood() -> None:
    packed = batch(sequence(0, 0, 1.0), sequence(1, 0, 0.0), sequence(0, 1, 1.0), sequence(2, 0, 0.0))
    grpo = Grpo(GrpoConfig(normalize_by=NormalizeBy.NONE))
    assert by_sequence(grpo.advantages(packed)) == [0.6667, -0.3333, 0.6667, -0.3333]
    # Without the first sequence and the last attempt: rewards 0 and 1.
    assert by_sequence(grpo.advantages(packed.select([1, 2]))) == [-0.5, 0.5]
