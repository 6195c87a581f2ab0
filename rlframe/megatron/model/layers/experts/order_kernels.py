"""Rows of tokens copied to places, and summed from there, by one kernel each on a GPU (Triton).

`order` defines both; the functions here correspond to its functions of the same names. Transformer Engine (2.20) takes
four kernels and 0.3 ms of the host for one, and needs the number of rows on the host before it begins.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 2048
"""Columns that one program copies at once."""


class Spread(torch.autograd.Function):
    """See `order.spread`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, places: Tensor, room: int
    ) -> tuple[Tensor, Tensor | None]:
        """Copies rows and weights."""
        ctx.save_for_backward(places)
        ctx.is_weighted = weights is not None
        return copied(rows, weights, places, room)

    @staticmethod
    def backward(ctx: Any, above: Tensor, of_weights: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        """Sums the gradients of copies."""
        (places,) = ctx.saved_tensors
        return *summed(above.contiguous(), of_weights if ctx.is_weighted else None, places), None, None


class Gathered(torch.autograd.Function):
    """See `order.gathered`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        """Sums rows."""
        ctx.save_for_backward(places)
        ctx.room = len(rows)
        return summed(rows, None, places)[0]

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        """Copies the gradient of a sum to each of its rows."""
        (places,) = ctx.saved_tensors
        return copied(above.contiguous(), None, places, ctx.room)[0], None


def spread(rows: Tensor, weights: Tensor | None, places: Tensor, room: int) -> tuple[Tensor, Tensor | None]:
    """See `order.spread`. Rows of the room that are nobody's place have no value."""
    return Spread.apply(rows.contiguous(), weights, places, room)


def gathered(rows: Tensor, places: Tensor) -> Tensor:
    """See `order.gathered`. Sums are float32 until they are stored."""
    return Gathered.apply(rows.contiguous(), places)


def copied(rows: Tensor, weights: Tensor | None, places: Tensor, room: int) -> tuple[Tensor, Tensor | None]:
    """Returns rows [room, F] and weights [room] of `order.spread`."""
    out = rows.new_empty(room, rows.shape[1])
    of_out = None if weights is None else weights.new_empty(room)
    if len(places):
        launch(_copy, rows, weights, places, out, of_out)
    return out, of_out


def summed(rows: Tensor, weights: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns [T, F] the sum of the rows at each token's places, and [T, E] the weight at each place, 0 without one."""
    out = rows.new_empty(len(places), rows.shape[1])
    of_out = None if weights is None else weights.new_empty(places.shape)
    if len(places):
        launch(_sum, rows, weights, places, out, of_out)
    return out, of_out


def launch(
    kernel: Any, rows: Tensor, weights: Tensor | None, places: Tensor, out: Tensor, of_out: Tensor | None
) -> None:
    """Runs a kernel, one program for a token and some columns."""
    (count, choices), width = places.shape, rows.shape[1]
    block = min(WIDEST, triton.next_power_of_2(width))
    kernel[(count, triton.cdiv(width, block))](
        rows, rows if weights is None else weights.contiguous(), places, out, out if of_out is None else of_out,
        choices, width, IS_WEIGHTED=weights is not None, CHOICES=triton.next_power_of_2(choices), BLOCK=block,
    )  # fmt: skip


@triton.jit
def _copy(
    rows, weights, places, out, of_out, choices, width, IS_WEIGHTED: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a part of a token's row to all its places."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    choice, col = tl.arange(0, CHOICES), part * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(places + token * choices + choice, mask=choice < choices, other=-1)
    if IS_WEIGHTED:
        if part == 0:
            weight = tl.load(weights + token * choices + choice, mask=own >= 0, other=0.0)
            tl.store(of_out + own, weight, mask=own >= 0)
    row = tl.load(rows + token * width + col, mask=col < width, other=0.0)
    place = tl.full((), -1, tl.int32)
    for _ in range(tl.sum((own >= 0).to(tl.int32), 0)):
        # The next greater one: a token has few, of many that it might have.
        place = tl.min(tl.where(own > place, own, 2147483647), 0)
        tl.store(out + place.to(tl.int64) * width + col, row, mask=col < width)


@triton.jit
def _sum(
    rows, weights, places, out, of_out, choices, width, IS_WEIGHTED: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums a part of the rows at a token's places."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    choice, col = tl.arange(0, CHOICES), part * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(places + token * choices + choice, mask=choice < choices, other=-1)
    if IS_WEIGHTED:
        if part == 0:
            weight = tl.load(weights + own, mask=own >= 0, other=0.0)
            tl.store(of_out + token * choices + choice, weight, mask=choice < choices)
    sums = tl.zeros((BLOCK,), tl.float32)
    place = tl.full((), -1, tl.int32)
    for _ in range(tl.sum((own >= 0).to(tl.int32), 0)):
        place = tl.min(tl.where(own > place, own, 2147483647), 0)
        row = tl.load(rows + place.to(tl.int64) * width + col, mask=col < width, other=0.0)
        sums += row.to(tl.float32)
    tl.store(out + token * width + col, sums.to(out.dtype.element_ty), mask=col < width)
