"""What sequences have in common is computed once, as far as ranks and micro-batches allow."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframe.megatron.driver.policy import shared_fraction, spared
from rlframe.megatron.messages.microbatch import split
from rlframe.ops import prefixes
from rlframe.ops.prefixes import share_prefixes
from rlframe.types.batch import Batch
from rlframe.types.supervised import Preferences


@pytest.fixture(autouse=True)
def _every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "FEWEST_TOKENS", 1)


def rollouts(groups: list[list[list[int]]], **fields: Any) -> Batch:
    """Groups of token ids."""
    rows = [torch.tensor(row) for group in groups for row in group]
    total = sum(map(len, rows))
    return Batch(
        token_ids=torch.cat(rows),
        lengths=torch.tensor([len(row) for row in rows]),
        loss_mask=torch.zeros(total, dtype=torch.bool),
        rollout_logprobs=torch.zeros(total),
        group=torch.repeat_interleave(torch.tensor([len(group) for group in groups])),
        rewards=torch.zeros(len(rows)),
        versions=torch.zeros(total, dtype=torch.int32),
        **fields,
    )


def test_all_but_the_last_common_token_is_shared() -> None:
    # The last one is followed by 4 in one and by 5 in the other, so each computes what predicts it.
    found = share_prefixes(rollouts([[[1, 2, 3, 4], [1, 2, 3, 5, 6]], [[7], [7]]]), num_ranks=1, max_tokens=100)
    assert found.bundles == [[0, 1], [2], [3]] and found.shared == [0, 2, 0, 0]
    assert found.sizes([4, 5, 1, 1]) == [7, 1, 1]


def test_each_sequence_shares_with_the_one_that_it_resembles_most() -> None:
    batch = rollouts([[[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 4, 5]]])
    found = share_prefixes(batch, num_ranks=1, max_tokens=100)
    assert found.bundles == [[0, 2], [1, 3]] and found.shared == [0, 0, 2, 3]


def test_sequences_of_a_long_prompt_share_the_same_number_of_tokens_if_little_is_computed_again() -> None:
    prompt, rest = list(range(100)), [200 + number for number in range(30)]
    # The first word of the responses is the same for the second, and the first two words for the third.
    group = [[*prompt, 150, 151, *rest], [*prompt, 150, 152], [*prompt, 150, 151, 153], [*prompt, 154]]

    def shared(group: list[list[int]], max_tokens: int = 1000) -> list[int]:
        return share_prefixes(rollouts([group]), num_ranks=1, max_tokens=max_tokens).shared

    # 132 tokens, then 3, 4 and 2: 3 of these 141 again.
    assert shared(group) == [0, 99, 99, 99]
    assert shared(group, max_tokens=141) == [0, 99, 99, 99]
    assert shared(group, max_tokens=140) == [0, 100, 101, 99], "the budget is kept"
    assert shared([*group[:3], [*prompt[:90], 154]]) == [0, 100, 101, 89], "23 tokens of 161 are too many"
    short = [[*row[95:], *range(300, 330)] for row in group]
    assert shared(short) == [0, 5, 6, 4], "attention reads little of the prompt"


def test_a_group_that_is_too_large_is_divided_and_repeats_its_prompt() -> None:
    batch = rollouts([[[1, 2, 3, 4, 5, index] for index in range(10, 16)]])
    # 6 tokens and 2 for each further rollout.
    found = share_prefixes(batch, num_ranks=1, max_tokens=10)
    assert found.bundles == [[0, 1, 2], [3, 4, 5]] and found.shared == [0, 4, 4, 0, 4, 4]
    # Of 16 tokens each of two ranks gets 8 at most.
    assert share_prefixes(batch, num_ranks=2, max_tokens=100).bundles == [[0, 1], [2, 3], [4, 5]]


def test_what_is_spared_is_counted() -> None:
    batch = rollouts([[[1, 2, 3, 4, 5, index] for index in range(10, 16)]])
    steps = [
        split(batch, torch.zeros(36), num_ranks=2, max_tokens=10, share_prompts=share_prompts)[0]
        for share_prompts in (True, False)
    ]
    # Two of three sequences of each rank have four of their six tokens from the first.
    assert spared(steps[:1]).tolist() == [4, 4, 4, 4] and spared(steps[1:]).tolist() == []
    assert shared_fraction(steps) == {"train/shared_prompt_fraction": 16 / 72}


def test_tokens_that_the_engine_routed_otherwise_are_not_shared() -> None:
    routes = torch.zeros(10, 1, 2, dtype=torch.uint8)
    routes[6, 0, 1] = 3
    batch = rollouts([[[1, 2, 3, 4, 8], [1, 2, 3, 4, 9]]], routes=routes)
    assert share_prefixes(batch, num_ranks=1, max_tokens=100).shared == [0, 1]


def test_a_pair_stays_whole_whether_it_shares_its_prompt_or_not() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7], [8, 7]]
    total = sum(map(len, rows))
    pairs = Preferences(
        token_ids=torch.tensor([token for row in rows for token in row]),
        lengths=torch.tensor([len(row) for row in rows]),
        loss_mask=torch.zeros(total, dtype=torch.bool),
        pair=torch.tensor([0, 0, 1, 1]),
        chosen=torch.tensor([True, False, True, False]),
        margin=torch.zeros(4),
    )
    found = share_prefixes(pairs, num_ranks=2, max_tokens=6)
    assert found.bundles == [[0, 1], [2, 3]] and found.shared == [0, 2, 0, 0]
    with pytest.raises(ValueError, match="the longest pair or group of sequences that belong together, 6 tokens"):
        split(pairs, torch.zeros(total), num_ranks=1, max_tokens=5, share_prompts=True)


@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    num_ranks=st.integers(1, 4),
    spare=st.integers(0, 40),
)
def test_micro_batches_hold_what_they_share_and_their_budget(
    prompts: list[int], lengths: list[int], num_ranks: int, spare: int
) -> None:
    batch = rollouts([
        [[*range(prompt), *(100 * number + place for place in range(length))] for number, length in enumerate(lengths)]
        for prompt in prompts
    ])  # fmt: skip
    budget = int(batch.lengths.max()) + spare
    weights = torch.arange(float(batch.num_tokens))
    shares, plan = split(batch, weights, num_ranks=num_ranks, max_tokens=budget, share_prompts=True)
    assert sorted(index for rank in plan for indices in rank for index in indices) == list(range(batch.num_sequences))
    for each in (microbatch for share in shares for microbatch in share.microbatches()):
        shared = each.batch.shared
        assert shared is not None and int((each.batch.lengths - shared).sum()) <= budget
        head: torch.Tensor | None = None
        for tokens, count in zip(each.batch.token_ids.split(each.batch.lengths.tolist()), shared.tolist(), strict=True):
            head = head if count else tokens
            assert head is not None
            assert count == 0 or (count < len(tokens) and torch.equal(head[: count + 1], tokens[: count + 1]))
