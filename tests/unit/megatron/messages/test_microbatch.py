"""What the driver sends the ranks, and how their answers come back together."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframe.megatron.messages.microbatch import join, optimizer_steps, split
from rlframe.types.batch import Batch, Sequences


def numbered(lengths: list[int]) -> Sequences:
    """Sequences whose every token is its own place in the batch."""
    total = sum(lengths)
    return Sequences(
        token_ids=torch.arange(total), lengths=torch.tensor(lengths), loss_mask=torch.arange(total) % 3 != 0
    )


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20), num_ranks=st.integers(1, 5), spare=st.integers(0, 30)
)
def test_join_undoes_split(lengths: list[int], num_ranks: int, spare: int) -> None:
    batch = numbered(lengths)
    weights = torch.arange(batch.num_tokens) / 8
    ranks, plan = split(batch, weights, num_ranks=num_ranks, max_tokens=max(lengths) + spare)
    microbatches = [microbatch for rank in ranks for microbatch in rank]
    assert sum(microbatch.batch.num_tokens for microbatch in microbatches) == batch.num_tokens
    for microbatch in microbatches:
        tokens = microbatch.batch.token_ids
        assert torch.equal(microbatch.weights, tokens / 8), "weights travel with their tokens"
        assert torch.equal(microbatch.batch.loss_mask, tokens % 3 != 0)
    answers = [[microbatch.batch.token_ids * 2.0 for microbatch in rank] for rank in ranks]
    assert torch.equal(join(answers, plan, batch.lengths), batch.token_ids * 2.0)


def test_every_sequence_is_in_one_optimizer_step_of_each_epoch() -> None:
    batch = numbered([1, 2, 3, 1, 1, 2])
    assert optimizer_steps(batch, num_minibatches=3, epochs_per_batch=2) == [[0, 1], [2, 3], [4, 5]] * 2
    assert optimizer_steps(batch, num_minibatches=1, epochs_per_batch=1) == [[0, 1, 2, 3, 4, 5]]


def test_rollouts_of_a_prompt_share_an_optimizer_step() -> None:
    # Three prompts of two rollouts each: with three parts a part is a prompt; six parts would halve one.
    batch = numbered([2] * 6)
    given = {field.name: getattr(batch, field.name) for field in fields(Sequences)}
    rollouts = Batch(
        **given,
        rollout_logprobs=torch.zeros(12),
        group=torch.tensor([0, 0, 1, 1, 2, 2]),
        rewards=torch.zeros(6),
        versions=torch.zeros(6, dtype=torch.int64),
    )
    assert optimizer_steps(rollouts, num_minibatches=3, epochs_per_batch=1) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(AssertionError):
        optimizer_steps(rollouts, num_minibatches=6, epochs_per_batch=1)


def test_an_empty_micro_batch_has_empty_weights() -> None:
    ranks, plan = split(numbered([3]), torch.ones(3), num_ranks=2, max_tokens=5)
    assert plan == [[[0]], [[]]]
    (empty,) = ranks[1]
    assert (empty.batch.num_sequences, empty.batch.num_tokens, empty.weights.numel()) == (0, 0, 0)
    assert torch.equal(join([[torch.ones(3)], [torch.zeros(0)]], plan, torch.tensor([3])), torch.ones(3))
