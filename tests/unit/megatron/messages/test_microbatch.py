"""What the driver sends the ranks, and how their answers come back together."""

import pickle
from dataclasses import fields

import numpy as np
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
    microbatches = [microbatch for share in ranks for microbatch in share.microbatches()]
    assert sum(microbatch.batch.num_tokens for microbatch in microbatches) == batch.num_tokens
    for microbatch in microbatches:
        tokens = microbatch.batch.token_ids
        assert torch.equal(microbatch.weights, tokens / 8), "weights travel with their tokens"
        assert torch.equal(microbatch.batch.loss_mask, tokens % 3 != 0)
    answers = [[microbatch.batch.token_ids * 2.0 for microbatch in share.microbatches()] for share in ranks]
    assert torch.equal(join(answers, plan, batch.lengths), batch.token_ids * 2.0)


def test_sequences_without_rows_leave_no_gap_in_what_is_joined() -> None:
    # Sequences 0, 2 and 3 have rows, of 2, 1 and 3; ranks have them in another order, and one of them an empty pass.
    plan = [[[3, 1], [0]], [[2], []]]
    answers = [[torch.tensor([5.0, 6.0, 7.0]), torch.tensor([1.0, 2.0])], [torch.tensor([4.0]), torch.empty(0)]]
    assert join(answers, plan, torch.tensor([2, 0, 1, 3])).tolist() == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]


def test_every_sequence_is_in_one_optimizer_step_of_each_epoch() -> None:
    batch = numbered([1, 2, 3, 1, 1, 2])
    assert optimizer_steps(batch, num_minibatches=3, epochs_per_batch=2) == [range(2), range(2, 4), range(4, 6)] * 2
    assert optimizer_steps(batch, num_minibatches=1, epochs_per_batch=1) == [range(6)]


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
    assert optimizer_steps(rollouts, num_minibatches=3, epochs_per_batch=1) == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(AssertionError):
        optimizer_steps(rollouts, num_minibatches=6, epochs_per_batch=1)


def test_a_share_comes_back_as_the_same_micro_batches_on_memory_of_its_own() -> None:
    (share,), _ = split(numbered([3, 1, 4, 2]), torch.arange(10.0), num_ranks=1, max_tokens=5)
    assert share.counts == [2, 2]
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(share, protocol=5, buffer_callback=buffers.append)
    # The memory that is handed over is the share's own.
    assert share.weights.data_ptr() in {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}
    again = pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in buffers])
    for before, after in zip(share.microbatches(), again.microbatches(), strict=True):
        for field in fields(Sequences):
            one, other = getattr(before.batch, field.name), getattr(after.batch, field.name)
            assert other is None if one is None else torch.equal(one, other), field.name
        assert torch.equal(before.weights, after.weights)
        after.weights.zero_()
    assert not again.weights.any(), "micro-batches are parts of their share"
    assert share.weights.any()


def test_an_empty_micro_batch_has_empty_weights() -> None:
    ranks, plan = split(numbered([3]), torch.ones(3), num_ranks=2, max_tokens=5)
    assert plan == [[[0]], [[]]]
    (empty,) = ranks[1].microbatches()
    assert (empty.batch.num_sequences, empty.batch.num_tokens, empty.weights.numel()) == (0, 0, 0)
    assert torch.equal(join([[torch.ones(3)], [torch.zeros(0)]], plan, torch.tensor([3])), torch.ones(3))
