"""Attention of a decode step by the items of a plan, and the joining of their results, on a GPU (Triton)."""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from rlframe.rollout.vllm.attention.plan import Plan, Tuning, queries_of_item


class Joining(NamedTuple):
    """Numbers that say how results are joined."""

    parts: int
    """Results of a row that a program joins at once."""
    columns: int
    """Numbers of each of them."""
    warps: int


FEW = Joining(16, 32, 1)
"""For up to `FEW_PROGRAMS` rows and heads of keys and values, each read by up to `FEW_QUERIES` heads of queries. One of
the best four of 17 on an H200 for 8 and 64 sequences and 2, 4 and 8 such heads, up to 8 microseconds a layer better
than results one by one. Those were better by 4 for 256 sequences (2026-11-29, by hand)."""
FEW_PROGRAMS, FEW_QUERIES = 512, 8


@triton.jit
def _pages_of(table, first, end, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """Returns the pages of `TOKENS` tokens from `first` on: a number if they have one page, of each token otherwise.
    Those from `end` on count as the last one before it."""
    if TOKENS <= PAGE:
        pages = tl.load(table + tl.minimum(first, end - 1) // PAGE)
    else:
        pages = tl.load(table + tl.minimum(first + tl.arange(0, TOKENS), end - 1) // PAGE)
    return pages


@triton.jit
def _add_tokens(
    queries,
    k,
    v,
    pages,
    first,
    end,
    top,
    total,
    result,
    scale,
    kv_page,
    kv_token,
    kv_head,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Returns greatest scores, sums and weighted values of the queries with `TOKENS` more tokens, from `first` on.

    Args:
        pages: of `_pages_of`.
        WHOLE: whether all of them are before `end`, so that nothing is masked. With masks everywhere, and twice the
            tokens, an H200 took 112 microseconds in place of 89 (`shared_attention.py equal`).
    """
    place = tl.arange(0, TOKENS)
    col = tl.arange(0, SIZE)
    inside = first + place < end
    if TOKENS <= PAGE:
        begin = pages.to(tl.int64) * kv_page + (first % PAGE) * kv_token
        at = place * kv_token + kv_head
        k, v = k + begin, v + begin
    else:
        at = pages.to(tl.int64) * kv_page + (first + place) % PAGE * kv_token + kv_head
    if WHOLE:
        keys = tl.load(k + (at[None, :] + col[:, None]))
        values = tl.load(v + (at[:, None] + col[None, :]))
        scores = tl.dot(queries, keys) * scale
    else:
        keys = tl.load(k + (at[None, :] + col[:, None]), mask=inside[None, :], other=0.0)
        values = tl.load(v + (at[:, None] + col[None, :]), mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(queries, keys) * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shares, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
    result = result * shrink[:, None] + tl.dot(shares.to(values.dtype), values)
    return new_top, total * shrink + tl.sum(shares, 1), result


@triton.jit
def _keep(
    key,
    value,
    k,
    v,
    slots,
    key_row,
    value_row,
    head_size,
    kv_page,
    kv_token,
    kv_head,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Writes the key and the value of one row and head. `DEPENDENT` as of `_attend`."""
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, col = tl.load(slots + row), tl.arange(0, SIZE)
    # Rows that are not used have no slot.
    if slot >= 0:
        at = slot // PAGE * kv_page + slot % PAGE * kv_token + head * kv_head + col
        tl.store(k + at, tl.load(key + row * key_row + head * head_size + col))
        tl.store(v + at, tl.load(value + row * value_row + head * head_size + col))


@triton.jit
def _attend(
    q, k, v, tables, order, items, count, partial, logsumexps, scale,
    q_row, q_head, kv_page, kv_token, kv_head, width, heads, programs,
    GROUP: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes items, each for one head of keys and values.

    Args:
        DEPENDENT: whether the kernel is launched before the one ahead of it has ended.
    """
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    query = tl.arange(0, QUERIES)
    col = tl.arange(0, SIZE)
    for work in range(tl.program_id(0), tl.load(count) * heads, programs):
        item, head = items + (work // heads) * 6, work % heads
        place, rows = tl.load(item), tl.load(item + 1)
        begin, end, slot = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        row, q_of = query // GROUP, head * GROUP + query % GROUP
        used = row < rows
        request = tl.load(order + place + row, mask=used, other=0).to(tl.int64)
        queries = tl.load(q + (request * q_row + q_of * q_head)[:, None] + col[None, :], mask=used[:, None], other=0.0)
        table = tables + tl.load(item + 5).to(tl.int64) * width
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        result = tl.zeros((QUERIES, SIZE), tl.float32)
        # Items begin with a page. All tokens but the last few are added without masks.
        whole = begin + (end - begin) // TOKENS * TOKENS
        pages = _pages_of(table, begin, end, PAGE, TOKENS)
        for first in range(begin, whole, TOKENS):
            # Found a turn earlier than they are needed: Triton would otherwise wait for them before each load of keys
            # and values, and have none of these under way.
            next_pages = _pages_of(table, first + TOKENS, end, PAGE, TOKENS)
            top, total, result = _add_tokens(
                queries, k, v, pages, first, end, top, total, result, scale, kv_page, kv_token, head * kv_head,
                PAGE, SIZE, TOKENS, WHOLE=True,
            )  # fmt: skip
            pages = next_pages
        if whole < end:
            top, total, result = _add_tokens(
                queries, k, v, pages, whole, end, top, total, result, scale, kv_page, kv_token, head * kv_head,
                PAGE, SIZE, TOKENS, WHOLE=False,
            )  # fmt: skip
        at = (slot + row).to(tl.int64) * heads * GROUP + q_of
        tl.store(partial + at[:, None] * SIZE + col[None, :], result / total[:, None], mask=used[:, None])
        tl.store(logsumexps + at, top + tl.log2(total), mask=used)


@triton.jit
def _join(
    partial,
    logsumexps,
    parts,
    out,
    out_row,
    out_head,
    heads,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Computes `COLUMNS` numbers of one row and head of keys and values: the mean of its results, weighted with their
    sums. `PARTS` results are read at once. `DEPENDENT` as of `_attend`."""
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    member = tl.arange(0, HEADS)
    q_of, col = head * GROUP + member, tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    used = member < GROUP
    shared, step, num_shared = tl.load(parts + row * 5), tl.load(parts + row * 5 + 1), tl.load(parts + row * 5 + 2)
    own, number = tl.load(parts + row * 5 + 3), num_shared + tl.load(parts + row * 5 + 4)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((HEADS, COLUMNS), tl.float32)
    for first in range(0, number, PARTS):
        index = first + tl.arange(0, PARTS)
        slot = tl.where(index < num_shared, shared + index * step, own + index - num_shared)
        at = slot.to(tl.int64)[:, None] * heads * GROUP + q_of[None, :]
        found = (index < number)[:, None] & used[None, :]
        logsumexp = tl.load(logsumexps + at, mask=found, other=float("-inf"))
        piece = tl.load(partial + at[:, :, None] * SIZE + col[None, None, :], mask=found[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(logsumexp, 0))
        # Heads that are not used have no results at all.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, shrink = tl.exp2(logsumexp - base[None, :]), tl.exp2(top - base)
        result = result * shrink[:, None] + tl.sum(piece * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    result = tl.where(total[:, None] > 0, result / total[:, None], 0.0)
    at = row.to(tl.int64) * out_row + q_of * out_head
    tl.store(out + at[:, None] + col[None, :], result.to(out.dtype.element_ty), mask=used[:, None])


def tokens_and_warps(tuning: Tuning, size: int) -> tuple[int, int]:
    """Returns the tokens that a program reads at once, and its warps, for heads of a dimension. A product takes 16
    tokens at least."""
    if size <= 128:
        return tuning.tokens, tuning.warps
    return max(tuning.tokens // 2, 16), max(tuning.warps, 4)


def joining_for(rows: int, heads: int, group: int, size: int) -> Joining:
    """Returns how the results of so many rows are joined."""
    if rows * heads <= FEW_PROGRAMS and group <= FEW_QUERIES:
        return FEW._replace(columns=min(FEW.columns, size))
    return Joining(1, size, 1 if group * size <= 512 else 4)


def can_depend(x: Tensor) -> bool:
    """Returns whether kernels on the tensor's device can begin before the one ahead has ended."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def keep(key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes keys and values to the cache.

    Args:
        key, value: [B, heads, D], with equal strides but for rows.
        k, v: [pages, tokens, heads, D], with equal strides.
        slots: [S] int64 places, S at most B, counted in tokens. -1 for rows that are not used.
    """
    dependent = can_depend(key)
    assert key.stride()[1:] == value.stride()[1:] and k.stride() == v.stride(), "keys beside values"
    _keep[(len(slots), key.shape[1])](
        key,
        value,
        k,
        v,
        slots,
        key.stride(0),
        value.stride(0),
        key.stride(1),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        PAGE=k.shape[1],
        SIZE=key.shape[2],
        DEPENDENT=dependent,
        num_warps=1,
        **({"launch_pdl": True} if dependent else {}),
    )


def attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor, tables: Tensor, *, scale: float, out: Tensor) -> None:
    """Computes the attention of one query of each sequence to all its tokens.

    Args:
        q: [B, H, D], one query of each sequence.
        k, v: [pages, tokens, heads, D] keys and values, with equal strides.
        tables: [B, P] int32, as of `Plan.fill`.
        scale: factor of the scores.
        out: [B, H, D] gets the result. Zeros for rows that are not used.
    """
    num_rows, query_heads, size = q.shape
    group, tuning = query_heads // plan.heads, plan.tuning
    tokens, warps = tokens_and_warps(tuning, size)
    joining = joining_for(num_rows, plan.heads, group, size)
    assert k.stride() == v.stride() and k.stride(-1) == q.stride(-1) == out.stride(-1) == 1, "keys beside values"
    dependent = can_depend(q)
    launch = {"launch_pdl": True} if dependent else {}
    _attend[(plan.programs,)](
        q,
        k,
        v,
        tables,
        plan.order,
        plan.items,
        plan.count,
        plan.partial,
        plan.logsumexps,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *k.stride()[:3],
        tables.stride(0),
        plan.heads,
        plan.programs,
        GROUP=group,
        PAGE=plan.page,
        QUERIES=queries_of_item(group),
        SIZE=size,
        TOKENS=tokens,
        DEPENDENT=dependent,
        num_stages=tuning.stages,
        num_warps=warps,
        **launch,
    )
    _join[(num_rows, plan.heads, size // joining.columns)](
        plan.partial,
        plan.logsumexps,
        plan.parts,
        out,
        *out.stride()[:2],
        plan.heads,
        GROUP=group,
        HEADS=triton.next_power_of_2(group),
        SIZE=size,
        COLUMNS=joining.columns,
        PARTS=joining.parts,
        DEPENDENT=dependent,
        num_warps=joining.warps,
        **launch,
    )
