"""Attention of a decode step with shared pages by Triton's interpreter; run by
tests/multiprocess/test_interpreted.py."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlframe.rollout.vllm.attention import kernels
from rlframe.rollout.vllm.attention import plan as plans
from rlframe.rollout.vllm.attention.kernels import attend
from rlframe.rollout.vllm.attention.plan import Plan, Tuning, rows_of_item

PAGE, SIZE, HEADS = 4, 16, 2


def tables_of(pages: Sequence[Sequence[int]]) -> Tensor:
    """Page tables, filled up with pages that hold nothing of theirs."""
    width = max(map(len, pages))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in pages], dtype=torch.int32)


def plan_of(max_rows: int, *, query_heads: int = HEADS, programs: int = 1, tokens: int = 16, chunk: int = 256) -> Plan:
    return Plan.of(
        tuning=Tuning(8, tokens, 1, 1, chunk, long_chunk=chunk),
        max_rows=max_rows,
        page=PAGE,
        heads=HEADS,
        query_heads=query_heads,
        width=SIZE,
        processors=programs,
        device=torch.device("cpu"),
    )


def expected(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """[B, H, D] softmax(q k / sqrt(D)) v of each row's own tokens, one row after the other."""
    group = q.shape[1] // HEADS
    out = torch.zeros_like(q, dtype=torch.float32)
    for row, length in enumerate(lengths.tolist()):
        places = [(int(tables[row, token // PAGE]), token % PAGE) for token in range(length)]
        for head in range(q.shape[1]) if length else ():
            keys = torch.stack([k[page, at, head // group] for page, at in places]).float()
            values = torch.stack([v[page, at, head // group] for page, at in places]).float()
            out[row, head] = torch.softmax(keys @ q[row, head].float() * scale, 0) @ values
    return out


SHARED = (
    # Two prompts of three and two whole pages, of four and two responses, mixed; the last row is not used.
    (
        [[1, 2, 3, 10], [4, 5, 11], [1, 2, 3, 12, 13], [1, 2, 3, 14], [4, 5, 15], [1, 2, 3, 16], [20]],
        [14, 9, 18, 13, 11, 16, 0],
    ),
    # A first page that four have, as of a system prompt: groups are of the deepest page. A row that shares less than
    # two others, whose tokens are its own then. Two whose last token is in the same page, which is nobody's share, and
    # a row that shares nothing.
    (
        [
            *([1, 2, 10], [1, 3, 11], [1, 2, 12], [1, 3, 13]),
            *([4, 5, 6, 14], [4, 5, 6, 15], [4, 16]),
            *([7, 8], [7, 8], [9, 17]),
        ],
        [9, 10, 11, 12, 13, 14, 5, 8, 8, 7],
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "query_heads", "least", "tokens"),
    # As many tokens at once as a page has, half as many, and those of several pages.
    [(0, 6, 4, 16), (0, 16, 1024, 4), (1, 2, 4, 2), (1, 2, 1024, 8)],
)
def test_every_row_attends_to_its_tokens(
    monkeypatch: pytest.MonkeyPatch, case: int, query_heads: int, least: int, tokens: int
) -> None:
    monkeypatch.setattr(plans, "CHUNK_STEP", 4)
    # Two results at once of half a row, which has up to five. Or one by one.
    monkeypatch.setattr(kernels, "FEW", kernels.Joining(2, SIZE // 2, 1))
    monkeypatch.setattr(kernels, "FEW_QUERIES", 0 if least > 4 else 8)
    pages, counts = SHARED[case]
    tables, lengths = tables_of(pages), torch.tensor(counts, dtype=torch.int32)
    generator = torch.Generator().manual_seed(case)
    cache = torch.randn(24, HEADS, PAGE, 2 * SIZE, generator=generator)
    # The order of a page in memory is the engine's choice.
    if case:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = cache.transpose(1, 2).split(SIZE, dim=-1)
    q = torch.randn(len(pages), query_heads, SIZE, generator=generator)
    plan, out = plan_of(10, query_heads=query_heads, tokens=tokens, chunk=least), torch.full_like(q, 7.0)
    plan.fill(tables, lengths)
    attend(plan, q, k, v, tables, scale=SIZE**-0.5, out=out)
    torch.testing.assert_close(out, expected(q, k, v, tables, lengths, SIZE**-0.5), atol=1e-5, rtol=1e-5)


def test_keys_and_values_are_written_to_their_slots() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(5, PAGE, HEADS, 2 * SIZE, generator=generator)
    k, v = cache.split(SIZE, dim=-1)
    slots = torch.tensor([7, -1, 0, 19, -1])
    # Parts of a larger tensor, with a row more than there are slots.
    key, value = torch.randn(6, 3, HEADS, SIZE, generator=generator).unbind(1)[:2]
    wanted = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // PAGE, slot % PAGE] = torch.cat((key[row], value[row]), -1)
    kernels.keep(key, value, k, v, slots)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize(
    ("tokens", "long", "items"),
    # Of 70 tokens while there are fewer than the 8 programs, of 100 where there are more, and of 128, a multiple of
    # CHUNK_STEP, so that no program has more than four for its two heads. Where items of `long` tokens are no more than
    # programs: for half of these, of 70 tokens at least, and of `long` at most. Items are whole pages of four tokens.
    [(280, 40, 4), (400, 40, 4), (800, 40, 8), (2000, 40, 16), (100, 200, 2), (280, 200, 2), (600, 200, 3)],
)
def test_items_are_longer_where_no_program_is_idle(tokens: int, long: int, items: int) -> None:
    plan = replace(plan_of(1), tuning=Tuning(8, 16, 1, 1, 70, 100, long))
    plan.fill(torch.arange(tokens // PAGE, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32))
    assert plan.count.item() == items


def test_shared_tokens_are_read_once() -> None:
    tables, lengths = tables_of(SHARED[0][0]), torch.tensor(SHARED[0][1], dtype=torch.int32)
    plan = plan_of(8)
    plan.fill(tables, lengths)
    items = plan.items[: int(plan.count)].tolist()
    # By hand: 12 tokens of four rows and 8 of two, then what each row has alone.
    assert [(rows, begin, end) for _, rows, begin, end, *_ in items] == [
        (4, 0, 12),
        (2, 0, 8),
        *((1, shared, length) for shared, length in zip((12, 8, 12, 12, 8, 12), lengths.tolist(), strict=False)),
    ]
    assert [plan.order[place].item() for place, *_ in items] == [0, 1, 0, 1, 2, 3, 4, 5]
    first, second = (0, 4, 12), (1, 2, 8)
    groups = [(leader, size, shared) for leader, _, size, shared in plan.groups[:6].tolist()]
    assert groups == [first, second, first, first, second, first]
    assert plan.groups[:6, 1].tolist() == [0, 0, 1, 2, 1, 3]
    assert plan.parts[6:, [2, 4]].eq(0).all(), "rows that are not used have no results"


def test_ranges_are_divided_into_like_parts_of_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CHUNK_STEP", 4)
    lengths = [17, 16, 50, 3, 0]
    tables = tables_of([[1 + 20 * row + page for page in range(13)] for row in range(len(lengths))])
    # More programs than there is work for, so that ranges are of the least length.
    plan = plan_of(len(lengths), programs=8, chunk=16)
    plan.fill(tables, torch.tensor(lengths, dtype=torch.int32))
    # By hand: 17 tokens are two parts of 9, which is 12 in whole pages; 50 are four of 13, which is 16.
    assert plan.items[: int(plan.count), 2:4].tolist() == [
        *([0, 12], [12, 17]),
        [0, 16],
        *([0, 16], [16, 32], [32, 48], [48, 50]),
        [0, 3],
    ]  # fmt: skip


def test_a_group_is_divided_where_it_has_more_rows_than_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CHUNK_STEP", 4)
    count = 7
    tables = tables_of([[1, 2, 3 + row] for row in range(count)])
    lengths = torch.full((count,), 9, dtype=torch.int32)
    plan = plan_of(count, query_heads=8 * HEADS, programs=8, chunk=4)
    plan.fill(tables, lengths)
    items = plan.items[: int(plan.count)]
    # By hand: two rows of eight queries fill a block of 16. Those who read the same tokens follow one another.
    assert [tuple(item[1:4].tolist()) for item in items[:8]] == [
        *[(2, 0, 4), (2, 0, 4), (2, 0, 4), (1, 0, 4)],
        *[(2, 4, 8), (2, 4, 8), (2, 4, 8), (1, 4, 8)],
    ]
    assert [tuple(item[1:4].tolist()) for item in items[8:]] == [(1, 8, 9)] * count
    slots = torch.cat([torch.arange(int(item[1])) + int(item[4]) for item in items])
    assert len(slots.unique()) == len(slots), "no two results have a slot"
    assert int(slots.max()) < len(plan.partial)


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (2, 8), (4, 4), (5, 3), (8, 2), (16, 1), (64, 1), (128, 1)])
def test_the_queries_of_an_item_fill_a_block(group: int, rows: int) -> None:
    assert rows_of_item(group) == rows
