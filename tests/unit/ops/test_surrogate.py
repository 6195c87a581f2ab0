"""The clipped surrogate and what is watched about it, worked by hand."""

import torch

from rlframe.ops.surrogate import (
    clipped_surrogate,
    masked_mean,
    sequence_means,
    soft_gate_surrogate,
    truncated_weight_surrogate,
)
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean

# Each row: probability ratio, advantage, loss, clipped; bounds 1 - 0.2 and 1 + 0.3.
ROWS = [
    (2.0, 1.0, -1.3, True),  # already likelier than 1.3 times: no further reward
    (2.0, -1.0, 2.0, False),  # likelier although bad: the full push down
    (0.5, 1.0, -0.5, False),
    (0.5, -1.0, 0.8, True),  # already below 0.8
    (1.25, 2.0, -2.5, False),  # above 1.2: the upper bound is the other number
    (0.75, -2.0, 1.6, True),  # above 0.7: so is the lower one
    (0.8, 1.0, -0.8, False),
    (2.0, 0.0, 0.0, False),
    (1.0, 3.0, -3.0, False),
]


def test_loss_and_clipped_tokens_with_different_bounds() -> None:
    ratio, advantages, losses, clipped = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    old = torch.linspace(-3, -1, len(ROWS))
    loss, was_clipped = clipped_surrogate(old + ratio.log(), old, advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(loss, losses)
    assert was_clipped.tolist() == clipped.tolist()


def test_clipped_tokens_have_no_gradient_and_the_others_that_of_the_ratio() -> None:
    ratio, advantages, _, clipped = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    logprobs = ratio.log().requires_grad_()
    loss, _ = clipped_surrogate(logprobs, torch.zeros(len(ROWS)), advantages, clip_low=0.2, clip_high=0.3)
    loss.sum().backward()
    inside = torch.ones(len(ROWS), dtype=torch.bool)
    inside[6] = False  # exactly on the bound, where the derivative is any number between both sides
    expected = torch.where(clipped, 0.0, -ratio * advantages)
    torch.testing.assert_close(logprobs.grad[inside], expected[inside])


def test_the_dual_clip_ends_the_push_down_and_is_the_two_sided_clip() -> None:
    ratio = torch.tensor([2.0, 4.0, 4.0, 0.5, 1.5])
    advantages = torch.tensor([-1.0, -2.0, 2.0, -1.0, -1.0])
    logprobs = ratio.log().requires_grad_()
    settings = {"clip_low": 0.2, "clip_high": 0.3}
    loss, clipped = clipped_surrogate(logprobs, torch.zeros(5), advantages, **settings, dual_clip=3.0)
    loss.sum().backward()
    # 2 is below 3; 4 counts as 3, and as 1.3 where it is good; 0.5 as 0.8.
    torch.testing.assert_close(loss.detach(), torch.tensor([2.0, 6.0, -2.6, 0.8, 1.5]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([2.0, 0.0, 0.0, 0.0, 1.5]))
    assert clipped.tolist() == [False, True, True, True, False]
    # INTELLECT-2's form: the ratio itself is at most delta where it is not clipped.
    two_sided = -torch.minimum(ratio.clamp(max=3.0) * advantages, ratio.clamp(0.8, 1.3) * advantages)
    torch.testing.assert_close(loss.detach(), two_sided)


def test_a_huge_ratio_stays_finite() -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss, _ = clipped_surrogate(
        logprobs, torch.tensor([-300.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2
    )  # e^300 is infinite in float32, e^20 is not
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([485165195.4]))
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0]


def test_masked_mean_is_a_sum_and_a_count() -> None:
    mask = torch.tensor([True, False, True])
    assert masked_mean(torch.tensor([1.0, 100.0, 4.0], requires_grad=True), mask) == Mean(5.0, 2.0)
    assert masked_mean(torch.zeros(0), mask[:0]) == Mean(0.0, 0.0)


def test_sequence_means_are_over_tokens_in_the_loss_and_have_their_gradient() -> None:
    batch = Sequences(
        token_ids=torch.zeros(6).long(),
        lengths=torch.tensor([3, 1, 2]),
        loss_mask=torch.tensor([False, True, True, False, False, True]),
    )
    values = torch.tensor([float("inf"), 1.0, 2.0, 8.0, 8.0, 5.0], requires_grad=True)
    means = sequence_means(values, batch)
    assert means.tolist() == [1.5, 1.5, 1.5, 0.0, 5.0, 5.0]
    (means * torch.tensor([0.0, 4.0, 2.0, 1.0, 0.0, 3.0])).sum().backward()
    # (4 + 2) / 2 for each of the two tokens, 3 / 1 for the last.
    assert values.grad is not None and values.grad.tolist() == [0.0, 3.0, 3.0, 0.0, 0.0, 3.0]


def test_the_truncated_weight_has_no_gradient_of_its_own() -> None:
    ratio, advantages = torch.tensor([8.0, 3.0, 0.01, 8.0]), torch.tensor([1.0, 1.0, 1.0, -2.0])
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    old = logprobs.detach() - ratio.log()
    loss, clipped = truncated_weight_surrogate(logprobs, old, advantages, clip_low=1.0, clip_high=4.0)
    loss.sum().backward()
    # Weights 5 (of 8), 3, 0.01 (no lower bound) and 5: -weight * A * logprob, whose slope is -weight * A.
    torch.testing.assert_close(loss.detach(), torch.tensor([5.0, 6.0, 0.03, -40.0]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([-5.0, -3.0, -0.01, 10.0]))
    assert clipped.tolist() == [True, False, False, True]
    _, clipped = truncated_weight_surrogate(logprobs, old, advantages, clip_low=0.2, clip_high=4.0)
    assert clipped.tolist() == [True, False, True, True]


def test_the_soft_gates_gradient_is_its_slope_times_ratio_times_advantage() -> None:
    ratio, advantages = torch.tensor([1.0, 1.0, 1.5, 0.5]), torch.tensor([2.0, -2.0, 1.0, -1.0])
    logprobs = ratio.log().requires_grad_()
    loss, slope = soft_gate_surrogate(
        logprobs, torch.zeros(4), advantages, temperature_positive=1.0, temperature_negative=2.0
    )
    loss.sum().backward()
    # 4 / tau * sigmoid(tau (r - 1)): 4 / 1 / 2 = 2; 4 / 2 / 2 = 1; 4 * sigmoid(0.5) = 4 * 0.622459; 2 * sigmoid(-1) =
    # 2 * 0.268941. Slopes: 1, 1, 4 * 0.622459 * 0.377541 = 0.940015, 4 * 0.268941 * 0.731059 = 0.786448.
    torch.testing.assert_close(loss.detach(), torch.tensor([-4.0, 2.0, -2.489837, 0.537883]))
    torch.testing.assert_close(slope, torch.tensor([1.0, 1.0, 0.940015, 0.786448]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, 2.0, -0.940015 * 1.5, 0.786448 * 0.5]))
