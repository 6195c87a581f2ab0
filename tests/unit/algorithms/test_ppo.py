"""PPO and its critic against numbers worked by hand; the critic's loss under every split; what the config refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.ppo import Ppo, PpoConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch
from rlframe.types.results import ValueOutput, merge

# p | a b o c of two turns, cut off, and p | d, which ended by itself; o is the environment's.
AFTER = torch.tensor([0.5, 1.0, 7.0, 2.0, 4.0, 0.25, 9.0])[:, None]
"""What the critic says given each token and those before it: a is chosen at 0.5, b at 1, c, after o, at 2, d at 0.25.
"""


def batch(**fields: Any) -> Batch:
    made: dict[str, Any] = {
        "token_ids": torch.arange(7),
        "lengths": torch.tensor([5, 2]),
        "loss_mask": torch.tensor([False, True, True, False, True, False, True]),
        "rollout_logprobs": torch.full((7,), -1.0),
        "group": torch.tensor([0, 1]),
        "rewards": torch.tensor([3.0, 1.0]),
        "versions": torch.zeros(7).long(),
        "truncated": torch.tensor([True, False]),
    }
    return Batch(**(made | fields))


def judged(data: Batch, **settings: Any) -> tuple[Batch, Tensor]:
    """The batch with values and returns, and its advantages."""
    algorithm = Ppo(PpoConfig(**settings))
    data = algorithm.with_values(data, AFTER)
    return data, algorithm.advantages(data)


def test_each_token_has_the_value_of_the_state_it_was_chosen_in() -> None:
    data, _ = judged(batch())
    assert data.values is not None and data.values.tolist() == [0, 0.5, 1, 7, 2, 0, 0.25]


def test_with_lambda_and_discount_one_returns_are_the_scores() -> None:
    # Advantages 3 - 0.5, 3 - 1, 3 - 2 and 1 - 0.25.
    data, advantages = judged(batch(), whiten_advantages=False)
    assert data.returns is not None and data.returns.tolist() == [0, 3, 3, 0, 3, 0, 1]
    assert advantages.tolist() == [0, 2.5, 2, 0, 1, 0, 0.75]


def test_returns_by_hand_with_a_discount() -> None:
    # gamma = lambda = 1/2. c: 3 - 2 = 1.  b: 2/2 - 1 + 1/4 * 1 = 1/4.  a: 1/2 - 1/2 + 1/4 * 1/4 = 1/16.
    data, advantages = judged(batch(), discount=0.5, gae_lambda=0.5, whiten_advantages=False)
    assert advantages.tolist() == [0, 0.0625, 0.25, 0, 1, 0, 0.75]
    assert data.returns is not None and data.returns.tolist() == [0, 0.5625, 1.25, 0, 3, 0, 1]


def test_a_rollout_that_was_cut_off_may_count_what_the_critic_expects_of_its_rest() -> None:
    # After its last token the critic says 4, and the score was 3; 9 after the other's, which ended, is nobody's.
    data, advantages = judged(batch(), bootstrap_truncated=True, whiten_advantages=False)
    assert data.returns is not None and data.returns.tolist() == [0, 7, 7, 0, 7, 0, 1]
    assert advantages.tolist() == [0, 6.5, 6, 0, 5, 0, 0.75]


def test_the_kl_comes_off_the_reward_of_each_token() -> None:
    # The policy that sampled is 0.4, 0.2, 0.6 | 0.8 nats above the reference: half of it each, from the token on.
    above = torch.tensor([9.0, 0.4, 0.2, 9.0, 0.6, 9.0, 0.8])
    data = batch(reference_logprobs=-1.0 - above)
    data, _ = judged(data, kl_coefficient=0.5)
    assert data.returns is not None
    torch.testing.assert_close(data.returns, torch.tensor([0, 3 - 0.6, 3 - 0.4, 0, 3 - 0.3, 0, 1 - 0.4]))


def test_advantages_are_whitened_over_the_batch_and_returns_are_not() -> None:
    # 2.5, 2, 1, 0.75: mean 1.5625, squares 0.87890625 + 0.19140625 + 0.31640625 + 0.66015625 = 2.046875, variance a
    # third of that, 0.68229167, root 0.82600948.
    data, advantages = judged(batch())
    expected = torch.tensor([0, 0.9375, 0.4375, 0, -0.5625, 0, -0.8125]) / 0.82600948
    torch.testing.assert_close(advantages, expected)
    assert data.returns is not None and data.returns.tolist() == [0, 3, 3, 0, 3, 0, 1]


def test_order_changes_no_value() -> None:
    data, swapped = batch(), batch().select([1, 0])
    algorithm = Ppo(PpoConfig(discount=0.9, gae_lambda=0.8))
    there = algorithm.with_values(data, AFTER).select([1, 0])
    here = algorithm.with_values(swapped, AFTER[[5, 6, 0, 1, 2, 3, 4]])
    assert here.returns is not None and there.returns is not None and torch.equal(here.returns, there.returns)
    torch.testing.assert_close(algorithm.advantages(here), algorithm.advantages(there))


def test_the_critics_loss_by_hand() -> None:
    # Before the update 0.5, 1, 2 | 0.25, returns 3, 3, 3 | 1; now 0.6, 1.5, 3.5 | 0.25 and values clipped to +-0.2.
    # a: 1/2 2.4^2 = 2.88.  b: 1.5 is clipped to 1.2, 1/2 max(1.5^2, 1.8^2) = 1.62.
    # c: 3.5 to 2.2, 1/2 max(0.5^2, 0.8^2) = 0.32.  d: 1/2 0.75^2 = 0.28125.  The mean of four is 1.2753125.
    algorithm = Ppo(PpoConfig(value_clip=0.2))
    data = algorithm.with_values(batch(), AFTER)
    now = torch.tensor([0.6, 1.5, 99.0, 3.5, 99.0, 0.25, 99.0], requires_grad=True)
    result = algorithm.critic.loss(ValueOutput(values=now[:, None]), data, algorithm.critic.token_weights(data))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(1.2753125)
    # b and c are clipped; what is said after b (the environment's turn) and after the last tokens trains nothing.
    assert now.grad is not None
    torch.testing.assert_close(now.grad, torch.tensor([-2.4, 0, 0, 0, 0, -0.75, 0]) / 4)
    metrics = {key: metric.value for key, metric in result.metrics.items()}
    assert metrics == pytest.approx(
        {
            "train/loss": 1.2753125,
            "train/value_mean": 5.85 / 4,
            "train/return_mean": 2.5,
            "train/clip_fraction": 0.5,
        }
    )


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_MEAN])
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 9), (2, 12), (5, 9), (9, 9)])
def test_no_split_changes_the_critics_loss(aggregation: Aggregation, num_ranks: int, max_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 2, 5, 1, 7, 4, 3])
    count = int(lengths.sum())
    mask = torch.rand(count, generator=generator) < 0.7
    mask[torch.cumsum(lengths, 0) - lengths] = False
    algorithm = Ppo(PpoConfig(aggregation=aggregation, value_clip=0.3))
    data = algorithm.with_values(
        Batch(
            token_ids=torch.arange(count),
            lengths=lengths,
            loss_mask=mask,
            rollout_logprobs=torch.zeros(count),
            group=torch.arange(7),
            rewards=torch.randn(7, generator=generator),
            versions=torch.zeros(count, dtype=torch.int64),
        ),
        torch.randn(count, 1, generator=generator),
    )
    now = torch.randn(count, generator=generator)

    def outcome(num_ranks: int, max_tokens: int) -> tuple[Tensor, dict[str, float]]:
        values = now.clone().requires_grad_()
        ranks, plan = split(data, algorithm.critic.token_weights(data), num_ranks=num_ranks, max_tokens=max_tokens)
        places = torch.arange(count).split(lengths.tolist())
        shares = []
        for rank, indices in zip(ranks, plan, strict=True):
            for microbatch, own in zip(rank.microbatches(), indices, strict=True):
                tokens = torch.cat([places[i] for i in own]) if own else torch.zeros(0, dtype=torch.int64)
                said = ValueOutput(values=values[tokens][:, None])
                assert isinstance(microbatch.batch, Batch)
                share = algorithm.critic.loss(said, microbatch.batch, microbatch.weights)
                share.loss.backward()
                shares.append(share.metrics)
        assert values.grad is not None
        return values.grad, {key: metric.value for key, metric in merge(shares).items()}

    gradient, metrics = outcome(num_ranks, max_tokens)
    whole, expected = outcome(1, count)
    torch.testing.assert_close(gradient, whole)
    assert metrics == pytest.approx(expected, rel=1e-5)
    # The state before a token of the loss is where gradients are, and nowhere else.
    assert not whole[~torch.cat([mask[1:], torch.tensor([False])])].any() and bool(whole.any())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discount": 0.0}, "discount must be above 0, got 0"),
        ({"gae_lambda": 1.5}, "gae_lambda must be at most 1, got 1.5"),
        ({"value_clip": 0.0}, r"value_clip must be above 0 \(null for no clipping\), got 0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps must be at least 0, got -1"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"bootstrap_truncated": True, "mask_truncated": True}, "bootstrap_truncated has no effect with mask_trunc"),
        ({"kl_coefficient": 0.1, "kl_estimator": KlEstimator.K3_PLUS}, "has no effect in the reward"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PpoConfig(**settings)
