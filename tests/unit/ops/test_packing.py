"""Packing rollouts, and dealing sequences to ranks and micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframe.ops.packing import pack, split_into_microbatches
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import OFFLINE_VERSION, Completion, FinishReason, Group, Rollout


def pairs(rollouts: list[Rollout]) -> list[Group]:
    """Returns groups of two."""
    halves = [rollouts[first : first + 2] for first in range(0, len(rollouts), 2)]
    return [Group(id=str(index), prompt=pair[0].prompt, rollouts=pair) for index, pair in enumerate(halves)]


def test_pack_puts_rollouts_end_to_end() -> None:
    prompts = [Prompt(id=name, text=name, input=ModelInput((7,))) for name in "ab"]
    rollouts = [
        Rollout(
            prompt=prompts[index // 2],
            sample_index=index % 2,
            input=ModelInput([7, *range(index)]),
            loss_mask=[False] + [True] * index,
            rollout_logprobs=[0.0] + [-0.5 * index] * index,
            versions=[OFFLINE_VERSION] + [9, 6 - index, 5][:index],
            finish_reason=FinishReason.STOP,
            reward=index / 4,
        )
        for index in range(4)
    ]
    batch = pack(pairs(rollouts))
    assert batch.token_ids.tolist() == [7, 7, 0, 7, 0, 1, 7, 0, 1, 2]
    assert batch.lengths.tolist() == [1, 2, 3, 4]
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 0, 1, 1, 0, 1, 1, 1]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([0, 0, -0.5, 0, -1, -1, 0, -1.5, -1.5, -1.5]))
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist() == [0.0, 0.25, 0.5, 0.75]
    assert batch.versions.tolist() == [-1, -1, 9, -1, 9, 4, -1, 9, 3, 5], "of each token, -1 where nobody sampled it"
    assert (batch.token_ids.dtype, batch.rollout_logprobs.dtype) == (torch.int64, torch.float32)


def test_groups_may_be_unequal_and_hold_what_was_sampled_in_any_order() -> None:
    prompt = Prompt(id="a", text="a", input=ModelInput((7,)))
    groups = [Group.begin("x", prompt, 3), Group.begin("y", prompt, 1), Group.begin("z", prompt, 2)]
    groups[0].rollouts.reverse()
    assert pack(groups).group.tolist() == [0, 0, 0, 1, 2, 2]
    assert pack([]).num_sequences == 0


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_routes_are_packed_with_a_row_for_the_last_token_which_has_none() -> None:
    rollouts = [
        Rollout(
            prompt=Prompt(id="a", text="a", input=ModelInput((7,))),
            sample_index=index,
            input=ModelInput([7, *[1] * index]),
            loss_mask=[False] + [True] * index,
            rollout_logprobs=[0.0] + [-1.0] * index,
            versions=[OFFLINE_VERSION] + [0] * index,
            finish_reason=FinishReason.STOP,
            routes=np.arange(index * 2, dtype=np.uint8).reshape(index, 1, 2) + 10 * index,
        )
        for index in (1, 2)
    ]
    for rollout in rollouts:
        # As those are that came from another process.
        assert rollout.routes is not None
        rollout.routes.flags.writeable = False
    routes = pack(pairs(rollouts)).routes
    assert routes is not None and routes.dtype == torch.uint8
    assert routes[:, 0].tolist() == [[10, 11], [0, 0], [20, 21], [22, 23], [0, 0]]
    for rollout in rollouts:
        rollout.routes = None
    assert pack(pairs(rollouts)).routes is None


def test_truncated_rollouts_stay_out_of_the_loss_when_asked_to() -> None:
    rollouts = [
        Rollout(
            prompt=Prompt(id="a", text="a", input=ModelInput((7,))),
            sample_index=index,
            input=ModelInput([7, 1, 2]),
            loss_mask=[False, True, True],
            rollout_logprobs=[0.0, -1.0, -1.0],
            versions=[OFFLINE_VERSION, 0, 0],
            finish_reason=finish,
        )
        for index, finish in enumerate([FinishReason.LENGTH, FinishReason.STOP])
    ]
    assert pack(pairs(rollouts)).loss_mask.int().tolist() == [0, 1, 1, 0, 1, 1]
    assert pack(pairs(rollouts), mask_truncated=True).loss_mask.int().tolist() == [0, 0, 0, 0, 1, 1]
    assert pack(pairs(rollouts)).truncated.tolist() == [True, False]


def test_the_last_sequence_says_for_its_whole_attempt_whether_it_was_truncated() -> None:
    ends = {
        (0, 0): FinishReason.STOP,
        (0, 1): FinishReason.LENGTH,
        (1, 0): FinishReason.LENGTH,
        (1, 1): FinishReason.STOP,
    }
    prompt = Prompt(id="a", text="a", input=ModelInput((7,)))
    rollouts = []
    for (sample_index, sequence), end in ends.items():
        rollout = Rollout.begin(prompt, sample_index)
        rollout.sequence, rollout.first_turn = sequence, sequence
        rollout.append(Completion(token_ids=[1], logprobs=[-1.0], versions=[0], finish_reason=end))
        rollouts.append(rollout)
    batch = pack([Group(id="a", prompt=prompt, rollouts=rollouts)], mask_truncated=True)
    assert batch.loss_mask.int().tolist() == [0, 0, 0, 0, 0, 1, 0, 1]
    assert batch.truncated is not None and batch.truncated.tolist() == [False, True, False, False]


def test_longest_first_to_the_emptiest_rank() -> None:
    # By length: 5 to rank 0; 4 to rank 1; 3 to rank 1, now 7; 2 to rank 0, now 7.
    assert split_into_microbatches([5, 3, 4, 2], num_ranks=2, max_tokens=7) == [[[0, 3]], [[2, 1]]]


def test_a_rank_with_fewer_micro_batches_splits_its_own() -> None:
    # 6 and 5 to ranks 0 and 1; 4 to rank 1 (9); 3 to rank 0 (9). Of 6 tokens: rank 0 fits 6 | 3, rank 1 5 | 4.
    assert split_into_microbatches([6, 5, 4, 3], num_ranks=2, max_tokens=6) == [[[0], [3]], [[1], [2]]]
    # 9 to rank 0; 3, 3, 3 to rank 1; 2 to rank 0 (both had 9). Rank 0 needs 9 | 2, rank 1 halves its one of 9.
    assert split_into_microbatches([9, 3, 3, 3, 2], num_ranks=2, max_tokens=9) == [[[0], [4]], [[1], [2, 3]]]


def test_a_rank_that_runs_out_of_sequences_gets_empty_micro_batches() -> None:
    assert split_into_microbatches([6, 6, 1], num_ranks=2, max_tokens=6) == [[[0], [2]], [[1], []]]
    assert split_into_microbatches([2], num_ranks=3, max_tokens=6) == [[[0]], [[]], [[]]]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    num_ranks=st.integers(1, 6),
    spare=st.integers(0, 60),
)
def test_every_plan_is_complete_even_and_within_budget(lengths: list[int], num_ranks: int, spare: int) -> None:
    max_tokens = max(lengths) + spare
    plan = split_into_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1, "collectives need equal numbers of micro-batches"
    assert sorted(index for rank in plan for microbatch in rank for index in microbatch) == list(range(len(lengths)))
    sizes = [[sum(lengths[index] for index in microbatch) for microbatch in rank] for rank in plan]
    assert max(size for rank in sizes for size in rank) <= max_tokens
    loads = [sum(rank) for rank in sizes]
    assert max(loads) - min(loads) <= max(lengths), "the last sequence of the fullest rank went to the emptiest"


def test_a_sequence_over_the_budget_is_refused() -> None:
    message = r"train\.max_tokens_per_microbatch must be at least the longest sequence, 9 tokens, got 8"
    with pytest.raises(ValueError, match=message):
        split_into_microbatches([3, 9, 2], num_ranks=1, max_tokens=8)


def test_a_unit_is_never_split() -> None:
    # Pairs (0, 2) of 3 + 4 and (1, 3) of 2 + 1 tokens: 7 to the first rank, 3 to the second, whose room is more.
    assert split_into_microbatches([3, 2, 4, 1], num_ranks=2, max_tokens=7, units=[5, 9, 5, 9]) == [[[0, 2]], [[1, 3]]]
    # On one rank 7 and 3 tokens do not fit together; alone each sequence would.
    assert split_into_microbatches([3, 2, 4, 1], num_ranks=1, max_tokens=8, units=[5, 9, 5, 9]) == [[[0, 2], [1, 3]]]
    with pytest.raises(ValueError, match="longest pair .* 7 tokens, got 6"):
        split_into_microbatches([3, 2, 4, 1], num_ranks=1, max_tokens=6, units=[5, 9, 5, 9])
