"""Group advantages against numbers worked by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframe.ops.advantages import group_advantages

REWARDS = torch.tensor([1.0, 3.0, 0.0, 2.0, 8.0, 2.0])
GROUP = torch.tensor([0, 0, 1, 1, 1, 0])


def test_without_normalisation_the_group_mean_is_taken_off() -> None:
    # Group 0 holds 1, 3, 2 with mean 2; group 1 holds 0, 2, 8 with mean 10/3.
    expected = [1 - 2, 3 - 2, 0 - 10 / 3, 2 - 10 / 3, 8 - 10 / 3, 2 - 2]
    torch.testing.assert_close(group_advantages(REWARDS, GROUP, normalize=False), torch.tensor(expected))


def test_normalised_divides_by_the_unbiased_standard_deviation() -> None:
    # Group 0: squares 1, 1, 0, variance (1 + 1 + 0) / 2 = 1. Group 1: squares 100/9, 16/9, 196/9, variance
    # 312 / 9 / 2 = 52/3, standard deviation 4.163332. With n instead of n - 1 the first would be +-1.2247.
    expected = [-1.0, 1.0, -10 / 3 / 4.163332, -4 / 3 / 4.163332, 14 / 3 / 4.163332, 0.0]
    actual = group_advantages(REWARDS, GROUP, normalize=True)
    torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-6, rtol=0)


def test_eps_is_added_to_the_standard_deviation() -> None:
    # Rewards 0 and 2: centred +-1, variance (1 + 1) / 1 = 2, so 1 / (1.414214 + 0.5) = 0.522408.
    actual = group_advantages(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), normalize=True, eps=0.5)
    torch.testing.assert_close(actual, torch.tensor([-0.522408, 0.522408]))


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 33), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, normalize: bool) -> None:
    # The mean of equal floats may round to another float: 0.1 seven times does. What is left over, divided by a
    # standard deviation of the same size, would be an advantage of order one.
    rewards, group = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    assert group_advantages(rewards, group, normalize=normalize).tolist() == [0.0] * size


def test_a_flat_group_does_not_silence_its_neighbours() -> None:
    rewards, group = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    assert group_advantages(rewards, group, normalize=False).tolist() == [0.0, 0.0, 0.0, -0.5, 0.5]


def test_group_numbers_may_have_gaps() -> None:
    # An optimizer step holds any subset of a batch's prompts.
    actual = group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([5, 5]), normalize=False)
    assert actual.tolist() == [-0.5, 0.5]


def test_no_rollouts_give_no_advantages() -> None:
    nothing = torch.zeros(0)
    assert group_advantages(nothing, nothing.long(), normalize=True).tolist() == []
