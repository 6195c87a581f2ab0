"""Queries, keys and values out of the output of their projection, and the gradient, on a GPU: the norms of query and
key heads and the rotary positions in one pass over memory (Triton).

The projection's output has a row for each token, and in it for each key head: its query heads, the key head, the value
head.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16
"""Number of heads of a token that one program holds in registers at once."""
PROGRAMS = 512
"""Number of programs that the tokens of a gradient are divided among, so that few sums are left for the weights."""
WARPS = 4
"""Number of warps of a program."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a row."""

    keys: int
    """Number of key heads."""
    group: int
    """Number of query heads of a key head."""
    size: int
    """Dimension D of a head, a power of 2."""

    @property
    def count(self) -> int:
        """Number of heads, those of queries, keys and values together."""
        return self.keys * (self.group + 2)


@triton.jit
def _forward(
    mixed, q_weight, k_weight, cos, sin, q, k, v, epsilon, COUNT: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, NORMED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Computes some heads of a token."""
    row = tl.program_id(0).to(tl.int64)
    head, col = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < COUNT)[:, None]
    source = (row * COUNT + head)[:, None] * (2 * HALF) + col[None, :]
    first = tl.load(mixed + source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(mixed + source + HALF, mask=inside, other=0.0).to(tl.float32)
    key, slot = head // (GROUP + 2), head % (GROUP + 2)
    is_key, is_value = (slot == GROUP)[:, None], (slot == GROUP + 1)[:, None]
    turned, other = first, second
    if NORMED:
        of_key, of_query = tl.load(k_weight + col).to(tl.float32), tl.load(q_weight + col).to(tl.float32)
        weight = tl.where(is_key, of_key[None, :], of_query[None, :])
        of_key, of_query = tl.load(k_weight + HALF + col).to(tl.float32), tl.load(q_weight + HALF + col).to(tl.float32)
        weights = tl.where(is_key, of_key[None, :], of_query[None, :])
        square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        rate = tl.rsqrt(square + epsilon)[:, None]
        # Rounded as the output of a norm is that is an operation of its own.
        turned = (first * rate * weight).to(mixed.dtype.element_ty).to(tl.float32)
        other = (second * rate * weights).to(mixed.dtype.element_ty).to(tl.float32)
    along, across = tl.load(cos + row * HALF + col)[None, :], tl.load(sin + row * HALF + col)[None, :]
    kind = q.dtype.element_ty
    to_first, to_second = (turned * along - other * across).to(kind), (other * along + turned * across).to(kind)
    place = ((row * (COUNT // (GROUP + 2)) + key) * GROUP + slot)[:, None] * (2 * HALF) + col[None, :]
    is_query = inside & (slot < GROUP)[:, None]
    tl.store(q + place, to_first, mask=is_query)
    tl.store(q + place + HALF, to_second, mask=is_query)
    place = (row * (COUNT // (GROUP + 2)) + key)[:, None] * (2 * HALF) + col[None, :]
    tl.store(k + place, to_first, mask=inside & is_key)
    tl.store(k + place + HALF, to_second, mask=inside & is_key)
    tl.store(v + place, first.to(kind), mask=inside & is_value)
    tl.store(v + place + HALF, second.to(kind), mask=inside & is_value)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    grad_q, grad_k, grad_v, mixed, q_weight, k_weight, cos, sin, out, sums, num_rows, epsilon, COUNT: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Computes some heads of every so many tokens, and of the gradient of the weights the sum over these."""
    head, col = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < COUNT)[:, None]
    key, slot = head // (GROUP + 2), head % (GROUP + 2)
    is_query, is_key = inside & (slot < GROUP)[:, None], inside & (slot == GROUP)[:, None]
    is_value = inside & (slot == GROUP + 1)[:, None]
    keys: tl.constexpr = COUNT // (GROUP + 2)
    total, totals = tl.zeros((HEADS, HALF), tl.float32), tl.zeros((HEADS, HALF), tl.float32)
    weight, weights = tl.zeros((HEADS, HALF), tl.float32), tl.zeros((HEADS, HALF), tl.float32)
    if NORMED:
        of_key, of_query = tl.load(k_weight + col).to(tl.float32), tl.load(q_weight + col).to(tl.float32)
        weight = tl.where(is_key, of_key[None, :], of_query[None, :])
        of_key, of_query = tl.load(k_weight + HALF + col).to(tl.float32), tl.load(q_weight + HALF + col).to(tl.float32)
        weights = tl.where(is_key, of_key[None, :], of_query[None, :])
    programs = tl.num_programs(0)
    for number in range(0, tl.cdiv(num_rows - tl.program_id(0), programs)):
        row = tl.program_id(0).to(tl.int64) + number * programs
        place = ((row * keys + key) * GROUP + slot)[:, None] * (2 * HALF) + col[None, :]
        above = tl.load(grad_q + place, mask=is_query, other=0.0).to(tl.float32)
        above_second = tl.load(grad_q + place + HALF, mask=is_query, other=0.0).to(tl.float32)
        place = (row * keys + key)[:, None] * (2 * HALF) + col[None, :]
        above += tl.load(grad_k + place, mask=is_key, other=0.0).to(tl.float32)
        above_second += tl.load(grad_k + place + HALF, mask=is_key, other=0.0).to(tl.float32)
        along, across = tl.load(cos + row * HALF + col)[None, :], tl.load(sin + row * HALF + col)[None, :]
        of_first, of_second = above * along + above_second * across, above_second * along - above * across
        source = (row * COUNT + head)[:, None] * (2 * HALF) + col[None, :]
        if NORMED:
            first = tl.load(mixed + source, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(mixed + source + HALF, mask=inside, other=0.0).to(tl.float32)
            square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
            rate = tl.rsqrt(square + epsilon)[:, None]
            first, second = first * rate, second * rate
            total += of_first * first
            totals += of_second * second
            of_first, of_second = of_first * weight, of_second * weights
            shared = (tl.sum(of_first * first, 1) + tl.sum(of_second * second, 1))[:, None] / (2 * HALF)
            of_first, of_second = rate * (of_first - first * shared), rate * (of_second - second * shared)
        # Those of values are 0 so far.
        of_first += tl.load(grad_v + place, mask=is_value, other=0.0).to(tl.float32)
        of_second += tl.load(grad_v + place + HALF, mask=is_value, other=0.0).to(tl.float32)
        tl.store(out + source, of_first.to(out.dtype.element_ty), mask=inside)
        tl.store(out + source + HALF, of_second.to(out.dtype.element_ty), mask=inside)
    if NORMED:
        # [programs, query or key, D]
        place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (4 * HALF) + col
        tl.store(sums + place, tl.sum(tl.where(is_query, total, 0.0), 0))
        tl.store(sums + place + HALF, tl.sum(tl.where(is_query, totals, 0.0), 0))
        tl.store(sums + place + 2 * HALF, tl.sum(tl.where(is_key, total, 0.0), 0))
        tl.store(sums + place + 3 * HALF, tl.sum(tl.where(is_key, totals, 0.0), 0))


def forward(
    mixed: Tensor, weights: tuple[Tensor, Tensor] | None, turns: tuple[Tensor, Tensor], heads: Heads, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [T, ..., keys * group, D], keys and values [T, ..., keys, D].

    Args:
        mixed: [T, ..., keys * (group + 2) * D] the projection's output; the middle axes have one element.
        weights: [D] of the norms of queries and of keys. None if there are none.
        turns: [T, D / 2] float32 cosine and sine of each token's angles.
    """
    mixed, rows = mixed.contiguous(), len(mixed)
    q = mixed.new_empty(*mixed.shape[:-1], heads.keys * heads.group, heads.size)
    k, v = (mixed.new_empty(*mixed.shape[:-1], heads.keys, heads.size) for _ in range(2))
    if rows:
        _forward[(rows, triton.cdiv(heads.count, HEADS))](
            mixed, *(weights or (mixed, mixed)), *turns, q, k, v, epsilon, COUNT=heads.count, GROUP=heads.group,
            HALF=heads.size // 2, NORMED=weights is not None, HEADS=HEADS, num_warps=WARPS,
        )  # fmt: skip
    return q, k, v


def backward(
    grads: tuple[Tensor, Tensor, Tensor],
    mixed: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    turns: tuple[Tensor, Tensor],
    heads: Heads,
    epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradient of `mixed` and, if there are weights, [2, D] float32 that of the weights of queries and of
    keys.

    Args:
        grads: those of queries, keys and values.
    """
    mixed, rows = mixed.contiguous(), len(mixed)
    out, blocks, programs = torch.empty_like(mixed), triton.cdiv(heads.count, HEADS), min(rows, PROGRAMS)
    sums = mixed.new_zeros(programs * blocks if weights else 1, 2, heads.size, dtype=torch.float32)
    if rows:
        _backward[(programs, blocks)](
            *(each.contiguous() for each in grads), mixed, *(weights or (mixed, mixed)), *turns, out, sums, rows,
            epsilon, COUNT=heads.count, GROUP=heads.group, HALF=heads.size // 2, NORMED=weights is not None,
            HEADS=HEADS, num_warps=WARPS,
        )  # fmt: skip
    return out, sums.sum(0) if weights else None
