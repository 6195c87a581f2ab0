"""Group advantages against numbers worked by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframe.ops.advantages import (
    NormalizeBy,
    discounted_returns,
    group_advantages,
    last_token_rewards,
    leave_one_out_advantages,
    whiten,
)
from rlframe.types.batch import Sequences

REWARDS = torch.tensor([1.0, 3.0, 0.0, 2.0, 8.0, 2.0])
GROUP = torch.tensor([0, 0, 1, 1, 1, 0])


def test_without_normalisation_the_group_mean_is_taken_off() -> None:
    # Group 0 holds 1, 3, 2 with mean 2; group 1 holds 0, 2, 8 with mean 10/3.
    expected = [1 - 2, 3 - 2, 0 - 10 / 3, 2 - 10 / 3, 8 - 10 / 3, 2 - 2]
    torch.testing.assert_close(group_advantages(REWARDS, GROUP, by=NormalizeBy.NONE), torch.tensor(expected))


def test_normalised_divides_by_the_unbiased_standard_deviation() -> None:
    # Group 0: squares 1, 1, 0, variance (1 + 1 + 0) / 2 = 1. Group 1: squares 100/9, 16/9, 196/9, variance
    # 312 / 9 / 2 = 52/3, standard deviation 4.163332. With n instead of n - 1 the first would be +-1.2247.
    expected = [-1.0, 1.0, -10 / 3 / 4.163332, -4 / 3 / 4.163332, 14 / 3 / 4.163332, 0.0]
    actual = group_advantages(REWARDS, GROUP, by=NormalizeBy.GROUP_STD)
    torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-6, rtol=0)


def test_eps_is_added_to_the_standard_deviation() -> None:
    # Rewards 0 and 2: centred +-1, variance (1 + 1) / 1 = 2, so 1 / (1.414214 + 0.5) = 0.522408.
    actual = group_advantages(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), by=NormalizeBy.GROUP_STD, eps=0.5)
    torch.testing.assert_close(actual, torch.tensor([-0.522408, 0.522408]))


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 33), st.sampled_from([*NormalizeBy][:3]))
def test_equal_rewards_give_exactly_zero(reward: float, size: int, by: NormalizeBy) -> None:
    # The mean of equal floats may round to another float: 0.1 seven times does. What is left over, divided by a
    # standard deviation of the same size, would be an advantage of order one.
    rewards, group = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    assert group_advantages(rewards, group, by=by).tolist() == [0.0] * size


def test_a_flat_group_does_not_silence_its_neighbours() -> None:
    rewards, group = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    assert group_advantages(rewards, group, by=NormalizeBy.NONE).tolist() == [0.0, 0.0, 0.0, -0.5, 0.5]


def test_group_numbers_may_have_gaps() -> None:
    # An optimizer step holds any subset of a batch's prompts.
    actual = group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([5, 5]), by=NormalizeBy.NONE)
    assert actual.tolist() == [-0.5, 0.5]


def test_no_rollouts_give_no_advantages() -> None:
    nothing = torch.zeros(0)
    assert group_advantages(nothing, nothing.long(), by=NormalizeBy.GROUP_STD).tolist() == []


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    # Group 0 holds 1, 3, 2: 1 - 2.5, 3 - 1.5, 2 - 2. Group 1 holds 0, 2, 8: 0 - 5, 2 - 4, 8 - 1.
    actual = leave_one_out_advantages(REWARDS, GROUP)
    torch.testing.assert_close(actual, torch.tensor([-1.5, 1.5, -5.0, -2.0, 7.0, 0.0]))


def test_leave_one_out_of_one_or_of_equals_is_zero() -> None:
    rewards, group = torch.tensor([5.0, 0.1, 0.1, 0.1]), torch.tensor([0, 3, 3, 3])
    assert leave_one_out_advantages(rewards, group).tolist() == [0.0] * 4


TURNS = Sequences(
    token_ids=torch.zeros(9, dtype=torch.int64),
    lengths=torch.tensor([6, 2, 1]),
    # The second sequence has no token in the loss; the first has an observation of one token between two turns.
    loss_mask=torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1]).bool(),
)


def test_the_score_lies_on_the_last_token_in_the_loss() -> None:
    actual = last_token_rewards(torch.tensor([2.0, 5.0, 3.0]), TURNS)
    assert actual.tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 3]


def test_returns_step_over_tokens_outside_the_loss() -> None:
    rewards = torch.tensor([9.0, 1.0, 2.0, 9.0, 4.0, 9.0, 9.0, 9.0, 3.0])
    # From the end: 4, then 2 + 0.5 * 4 = 4 (the observation neither discounts nor earns its 9), then 1 + 0.5 * 4 = 3.
    assert discounted_returns(rewards, TURNS, discount=0.5).tolist() == [0, 3, 4, 0, 4, 0, 0, 0, 3]
    assert discounted_returns(rewards, TURNS, discount=1.0).tolist() == [0, 7, 6, 0, 4, 0, 0, 0, 3]


def test_returns_of_a_batch_without_tokens_in_the_loss_are_zero() -> None:
    nothing = Sequences(
        token_ids=torch.zeros(2).long(), lengths=torch.tensor([2]), loss_mask=torch.zeros(2, dtype=torch.bool)
    )
    assert discounted_returns(torch.ones(2), nothing, discount=0.5).tolist() == [0.0, 0.0]
    assert last_token_rewards(torch.ones(1), nothing).tolist() == [0.0, 0.0]


def test_whitening_looks_at_the_masked_in_values_of_the_whole_batch() -> None:
    # 1, 1, 2: mean 4/3, squares 1/9 + 1/9 + 4/9 = 2/3, variance 1/3 by n - 1, so -1/3 and 2/3 times 1.732051.
    actual = whiten(torch.tensor([1.0, 70.0, 1.0, 2.0]), torch.tensor([True, False, True, True]))
    torch.testing.assert_close(actual, torch.tensor([-0.577350, 0.0, -0.577350, 1.154701]))


@given(st.floats(-1e6, 1e6, width=32), st.integers(0, 33))
def test_whitening_equal_values_gives_exactly_zero(value: float, size: int) -> None:
    values = torch.full((size,), value)
    assert whiten(values, torch.ones(size, dtype=torch.bool)).tolist() == [0.0] * size
