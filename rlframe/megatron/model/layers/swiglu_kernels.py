"""SwiGLU and its gradient on a GPU, each in one pass over memory (Triton).

Megatron-Core 0.16.1 and 0.19.2 give these functions to torch.compile (`megatron.core.jit`), which starts a compiler in
every rank: seconds at the first forward pass, at the first backward pass, and again at batches of other lengths.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of columns that one program holds in registers at once."""


def install() -> None:
    """Puts these functions in the place of Megatron's of the same names."""
    from megatron.core.fusions import fused_bias_swiglu  # noqa: PLC0415 - not for Triton's interpreter

    for function in (swiglu, swiglu_back, weighted_swiglu, weighted_swiglu_back):
        setattr(fused_bias_swiglu, function.__name__, function)


@triton.jit
def _forward(inputs, weights, out, row_stride, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Computes a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    gate = tl.load(inputs + row * row_stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inputs + row * row_stride + width + col, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        value = value * tl.load(weights + row).to(tl.float32)
    tl.store(out + row * width + col, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, inputs, weights, out, grad_weights, grad_stride, row_stride, width, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes a row of the gradient of the inputs, and the gradient of its weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.full((), 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + row).to(tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < width
        above = tl.load(grad + row * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(inputs + row * row_stride + col, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inputs + row * row_stride + width + col, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        total += tl.sum(gate * sigmoid * up * above, 0)
        above = above * weight
        of_gate = above * sigmoid * (1 + gate * (1 - sigmoid)) * up
        tl.store(out + row * 2 * width + col, of_gate.to(out.dtype.element_ty), mask=inside)
        tl.store(out + row * 2 * width + width + col, (above * gate * sigmoid).to(out.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, total.to(grad_weights.dtype.element_ty))


def swiglu(y: Tensor) -> Tensor:
    """Returns [T, F] silu(gate) * up, from `y` [T, 2 F] with the gate in the first half. It is computed in float32.
    Source: Shazeer 2020, arXiv 2002.05202, equation 5."""
    return forward(y, None)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """Returns [T, F] SwiGLU of `y` [T, 2 F] times the weight of each row.

    Args:
        weights: [T, 1].
    """
    return forward(y, weights)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Returns [T, 2 F] the gradient of `y` [T, 2 F], from `g` [T, F], that of its SwiGLU."""
    return backward(g, y, None)[0]


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `y` [T, 2 F] and of `weights` [T, 1], from `g` [T, F]."""
    of_inputs, of_weights = backward(g, y, weights)
    assert of_weights is not None
    return of_inputs, of_weights


def forward(inputs: Tensor, weights: Tensor | None) -> Tensor:
    """Returns [T, F] SwiGLU of `inputs` [T, 2 F], times the weights [T, 1] of rows if there are any."""
    inputs = dense_rows(inputs)
    (rows, both), width = inputs.shape, inputs.shape[-1] // 2
    assert both == 2 * width
    out = inputs.new_empty(rows, width)
    if rows:
        _forward[(rows, triton.cdiv(width, BLOCK))](
            inputs,
            inputs if weights is None else weights.contiguous(),
            out,
            inputs.stride(0),
            width,
            WEIGHTED=weights is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


def backward(grad: Tensor, inputs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of inputs [T, 2 F] and weights [T, 1], which may be none, from `grad` [T, F]."""
    grad, inputs = dense_rows(grad), dense_rows(inputs)
    (rows, width), out = grad.shape, torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    of_weights = None if weights is None else torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    if rows:
        _backward[(rows,)](
            grad,
            inputs,
            inputs if weights is None else weights.contiguous(),
            out,
            out if of_weights is None else of_weights,
            grad.stride(0),
            inputs.stride(0),
            width,
            WEIGHTED=weights is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out, of_weights


def dense_rows(values: Tensor) -> Tensor:
    """Returns values whose rows are without gaps."""
    return values if values.stride(-1) == 1 else values.contiguous()
