"""Gradients of queries, keys, decays and writes of the gated delta rule on Hopper, for flash-linear-attention (Triton).

Its own kernel transposes what a matrix product has just left in registers, which Triton 3.4 to 3.7.0 compiles wrongly
for Hopper (flash-linear-attention #640); 0.6 refuses to run it there. Here the transposed matrix is a product of its
own. `chunk_bwd_dqkwg` of fla/ops/common/chunk_o.py defines the computation; the names of its arguments are kept.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from fla.backends import BaseBackend, register
from packaging.version import Version
from torch import Tensor

BLOCK = 64
"""Channels of keys, and of values, that one program holds at once."""


@triton.jit
def _gradients(
    q, k, v, g, h, do, dh, dv, dq, dk, dw, dg, cu_seqlens, chunk_indices, scale, num_tokens, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Computes for one chunk, one value head and BK channels of its key: dq, dk, dw, and their part of dg."""
    part, chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    sequence = tl.load(chunk_indices + 2 * chunk)
    first = tl.load(cu_seqlens + sequence).to(tl.int64) + tl.load(chunk_indices + 2 * chunk + 1).to(tl.int64) * BT
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    row, channel, place = first + tl.arange(0, BT), part * BK + tl.arange(0, BK), tl.arange(0, BT)
    here, inside = row < end, channel < K
    of_value, of_key = row * HV + head, row * H + head // (HV // H)
    state = (chunk * HV + head) * K * V
    d_query, d_key, d_write = (
        tl.zeros((BT, BK), tl.float32),
        tl.zeros((BT, BK), tl.float32),
        tl.zeros((BT, BK), tl.float32),
    )
    by_query, by_key = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
    carried = tl.full((), 0.0, tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        wide = here[:, None] & (column < V)[None, :]
        value = tl.load(v + of_value[:, None] * V + column[None, :], mask=wide, other=0.0)
        above = tl.load(do + of_value[:, None] * V + column[None, :], mask=wide, other=0.0)
        written = tl.load(dv + of_value[:, None] * V + column[None, :], mask=wide, other=0.0).to(value.dtype)
        square = (column < V)[:, None] & inside[None, :]
        places = state + channel[None, :] * V + column[:, None]
        before = tl.load(h + places, mask=square, other=0.0).to(value.dtype)
        after = tl.load(dh + places, mask=square, other=0.0).to(value.dtype)
        carried += tl.sum(before.to(tl.float32) * after.to(tl.float32))
        by_query = tl.dot(above, tl.trans(value), by_query)
        by_key = tl.dot(value, tl.trans(above), by_key)
        d_query = tl.dot(above, before, d_query)
        d_key = tl.dot(value, after, d_key)
        d_write = tl.dot(written, before, d_write)
    narrow = here[:, None] & inside[None, :]
    tl.store(dw + of_value[:, None] * K + channel[None, :], -d_write, mask=narrow)
    key = tl.load(k + of_key[:, None] * K + channel[None, :], mask=narrow, other=0.0)
    query = tl.load(q + of_key[:, None] * K + channel[None, :], mask=narrow, other=0.0)
    # Running sums of the chunk's decays, as logarithms to the base 2.
    total = tl.load(g + of_value, mask=here, other=0.0)
    last = tl.minimum(first + BT, end) - 1
    whole = tl.load(g + last * HV + head)
    d_query *= tl.exp2(total)[:, None] * scale
    d_key *= tl.where(here, tl.exp2(whole - total), 0.0)[:, None]
    carried = carried * tl.exp2(whole) + tl.sum(d_key * key)
    both = here[:, None] & here[None, :]
    lower, upper = (place[:, None] >= place[None, :]) & both, (place[:, None] <= place[None, :]) & both
    by_query = tl.where(lower, by_query * tl.exp2(total[:, None] - total[None, :]), 0.0) * scale
    by_key = tl.where(upper, by_key * tl.exp2(total[None, :] - total[:, None]), 0.0) * scale
    d_query = tl.dot(by_query.to(key.dtype), key, d_query)
    d_key = tl.dot(by_key.to(key.dtype), query, d_key)
    of_decay = tl.sum(d_query * query, 1) - tl.sum(d_key * key, 1)
    tl.store(dq + of_value[:, None] * K + channel[None, :], d_query, mask=narrow)
    tl.store(dk + of_value[:, None] * K + channel[None, :], d_key, mask=narrow)
    tl.store(dg + part * num_tokens * HV + of_value, tl.where(row == last, of_decay + carried, of_decay), mask=here)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor, g: Tensor, dv: Tensor,
    scale: float, cu_seqlens: Tensor, chunk_size: int, chunk_indices: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q and k [1, T, key heads, K], of w [1, T, value heads, K] and of g [1, T, value heads].

    Args:
        q: [1, T, key heads, K], as k.
        v: [1, T, value heads, V] what each token writes, as its gradient dv and that of the outputs, do.
        h: [1, chunks, value heads, K, V] the states before the chunks, as dh, the gradients of those after them.
        g: [1, T, value heads] float32, running sums of the decays of a chunk, to the base 2.
    """
    _, tokens, heads, width = k.shape
    value_heads, values = v.shape[2:]
    parts = triton.cdiv(width, BLOCK)
    dq, dk = (part.new_empty(1, tokens, value_heads, width) for part in (q, k))
    dw = torch.empty_like(w)
    dg = torch.empty(parts, *g.shape, dtype=torch.float32, device=g.device)
    _gradients[parts, len(chunk_indices), value_heads](
        q, k, v, g, h, do, dh, dv, dq, dk, dw, dg, cu_seqlens, chunk_indices, scale, tokens,
        heads, value_heads, width, values, chunk_size, BLOCK, BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    shares = (1, tokens, heads, value_heads // heads, width)
    return dq.view(shares).sum(3), dk.view(shares).sum(3), dw, dg.sum(0)


@register("common")
class RlframeBackend(BaseBackend):
    """Puts `gradients` in the place of the kernel that flash-linear-attention refuses to run."""

    backend_type = "rlframe"
    priority = 0

    @classmethod
    @cache
    def is_available(cls) -> bool:
        """Returns whether the kernel would be compiled wrongly."""
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
        return hopper and Version("3.4") <= Version(triton.__version__) < Version("3.7.1")

    def chunk_bwd_dqkwg_verifier(self, **arguments: Any) -> tuple[bool, str | None]:
        """Returns whether these are arguments of the gated delta rule over packed sequences, and what else they are."""
        given = all(arguments.get(name) is not None for name in ("w", "g", "dv", "cu_seqlens", "chunk_indices"))
        plain = arguments.get("g_gamma") is None and not arguments.get("state_v_first")
        return given and plain, None if given and plain else "not the gated delta rule over packed sequences"

    def chunk_bwd_dqkwg(
        self, *, state_v_first: bool = False, **arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns `gradients`."""
        return gradients(**arguments)
