"""Values, advantages and what the critic learns from: worked by hand, and against the recurrence token by token."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlframe.ops.advantages import last_token_rewards
from rlframe.ops.gae import (
    after_sequences,
    before_tokens,
    clipped_value_loss,
    explained_variance,
    generalized_advantages,
)
from rlframe.types.batch import Batch, Sequences

# Two turns: prompt p q, the policy says a b, the environment answers o, the policy says c. Then a rollout of one token.
MASK = [False, False, True, True, False, True, False, True]
TURNS = Sequences(
    token_ids=torch.arange(8), lengths=torch.tensor([6, 2]), loss_mask=torch.tensor(MASK)
)  # fmt: skip
REWARDS = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 2.0])
BEFORE = torch.tensor([0.0, 9.0, 1.0, 1.0, 99.0, 3.0, 0.0, 0.5])
NOTHING_AFTER = torch.zeros(2)


def noise(seed: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def random_turns() -> Sequences:
    """Rollouts of 1 to 9 tokens with gaps in their masks; the third has no token in the loss."""
    lengths = torch.tensor([9, 4, 3, 1, 7])
    mask = noise(0, 24) > -0.4
    mask[torch.cumsum(lengths, 0) - lengths] = False
    mask[13:16] = False
    return Sequences(token_ids=torch.arange(24), lengths=lengths, loss_mask=mask)


def recurrence(rewards: Tensor, values: Tensor, batch: Sequences, discount: float, lam: float, final: Tensor) -> Tensor:
    """verl's loop, one token after the other from the end, V_next and A carried past what is masked."""
    result, end = torch.zeros(batch.num_tokens), 0
    for index, length in enumerate(batch.lengths.tolist()):
        begin, end = end, end + length
        value_next, advantage = float(final[index]), 0.0
        for t in reversed(range(begin, end)):
            if batch.loss_mask[t]:
                error = float(rewards[t]) + discount * value_next - float(values[t])
                value_next, advantage = float(values[t]), error + discount * lam * advantage
                result[t] = advantage
    return result


def test_a_models_values_move_to_the_state_before_each_token() -> None:
    # A value given tokens 0..t is that of the state in which token t + 1 is chosen; nothing crosses into sequence 2.
    after = torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 20.0, 21.0], requires_grad=True)
    before = before_tokens(after, TURNS)
    assert before.tolist() == [0, 10, 11, 12, 13, 14, 0, 20]
    assert after_sequences(after, TURNS).tolist() == [15, 21]
    before.sum().backward()
    assert after.grad is not None and after.grad.tolist() == [1, 1, 1, 1, 1, 0, 1, 0]


def test_values_of_nothing_are_nothing() -> None:
    # What a data-parallel rank without sequences computes.
    assert before_tokens(torch.zeros(0), TURNS.select([])).shape == (0,)


def test_advantages_by_hand_over_two_turns() -> None:
    # gamma = lambda = 1/2. The state after b, then o, is the one in which c is chosen: V = 3, whatever stands at o.
    # delta_c = 5 + 0 - 3 = 2          A_c = 2
    # delta_b = 0 + 3/2 - 1 = 1/2      A_b = 1/2 + 1/4 * 2 = 1
    # delta_a = 0 + 1/2 - 1 = -1/2     A_a = -1/2 + 1/4 * 1 = -1/4
    # The second rollout: 2 - 1/2 = 3/2.
    settings = {"discount": 0.5, "gae_lambda": 0.5}
    found = generalized_advantages(REWARDS, BEFORE, TURNS, final_values=NOTHING_AFTER, **settings)
    assert found.tolist() == [0, 0, -0.25, 1, 0, 2, 0, 1.5]
    # Cut off where the critic says 4: delta_c = 5 + 4/2 - 3 = 4, A_b = 1/2 + 4/4 = 3/2, A_a = -1/2 + 3/8 = -1/8.
    cut = generalized_advantages(REWARDS, BEFORE, TURNS, final_values=torch.tensor([4.0, 0.0]), **settings)
    assert cut.tolist() == [0, 0, -0.125, 1.5, 0, 4, 0, 1.5]


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 0.7)])
def test_advantages_equal_the_recurrence(discount: float, lam: float) -> None:
    batch, rewards, values, final = random_turns(), noise(1, 24), noise(2, 24), noise(3, 5)
    found = generalized_advantages(rewards, values, batch, discount=discount, gae_lambda=lam, final_values=final)
    torch.testing.assert_close(found, recurrence(rewards, values, batch, discount, lam, final))
    # What stands outside the loss is not read.
    changed = torch.where(batch.loss_mask, values, torch.nan)
    again = generalized_advantages(rewards, changed, batch, discount=discount, gae_lambda=lam, final_values=final)
    assert torch.equal(again, found)


def test_with_lambda_and_discount_one_the_return_is_the_reward_to_go() -> None:
    batch, values = random_turns(), noise(2, 24)
    scores = torch.tensor([1.0, -2.0, 7.0, 7.0, 0.5])
    rewards = last_token_rewards(scores, batch)
    found = generalized_advantages(rewards, values, batch, discount=1.0, gae_lambda=1.0, final_values=torch.zeros(5))
    expected = torch.where(batch.loss_mask, scores[batch.sequence_index()] - values, 0.0)
    torch.testing.assert_close(found, expected)


def test_with_lambda_zero_the_advantage_is_the_td_error() -> None:
    # 0.9 V(next token in the loss) - V; b looks past the observation at c.
    found = generalized_advantages(REWARDS, BEFORE, TURNS, discount=0.9, gae_lambda=0.0, final_values=NOTHING_AFTER)
    torch.testing.assert_close(found, torch.tensor([0, 0, 0.9 - 1, 2.7 - 1, 0, 5 - 3, 0, 2 - 0.5]))


def test_value_loss_by_hand() -> None:
    # Old value 1, clip 0.5, return 2.
    # V = 1.2: within, 1/2 * 0.8^2 = 0.32.  V = 1.9: clipped to 1.5, 1/2 max(0.1^2, 0.5^2) = 0.125.
    # V = 3:   clipped to 1.5, 1/2 max(1, 0.25) = 0.5.  V = 0: clipped to 0.5, 1/2 max(4, 2.25) = 2.
    values = torch.tensor([1.2, 1.9, 3.0, 0.0], requires_grad=True)
    loss, clipped = clipped_value_loss(values, torch.ones(4), torch.full((4,), 2.0), clip=0.5)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.32, 0.125, 0.5, 2.0]))
    assert clipped.tolist() == [False, True, False, False]
    loss.sum().backward()
    # V - R, and none where the clipped value is the worse one.
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.8, 0.0, 1.0, -2.0]))
    plain, none = clipped_value_loss(values.detach(), torch.ones(4), torch.full((4,), 2.0), clip=None)
    torch.testing.assert_close(plain, torch.tensor([0.32, 0.005, 0.5, 2.0]))
    assert not none.any()


def test_explained_variance_by_hand() -> None:
    # The fifth token is not in the loss; no reward function scored the rollout of the last two.
    batch = Batch(
        token_ids=torch.arange(7),
        lengths=torch.tensor([5, 2]),
        loss_mask=torch.tensor([True, True, True, True, False, True, True]),
        rollout_logprobs=torch.zeros(7),
        group=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, math.nan]),
        versions=torch.zeros(7).long(),
    )
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0, 50.0, 9.0, -9.0])

    def found(*values: float) -> float:
        own = torch.tensor([*values, 9.0, -9.0])
        return explained_variance(replace(batch, values=own, returns=returns))

    assert found(0.0, 1.0, 2.0, 3.0, 7.0) == 1.0
    assert found(7.0, 7.0, 7.0, 7.0, 7.0) == 0.0
    # Errors 0, 0, 1, 1 have variance 1/4, returns 5/4: 1 - 1/5.
    assert found(0.0, 1.0, 1.0, 2.0, 0.0) == pytest.approx(0.8)
    assert explained_variance(replace(batch, values=returns, returns=torch.ones(7))) == 0.0
