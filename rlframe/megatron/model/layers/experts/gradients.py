"""Gradients of the weights of all experts of a layer by one kernel on a GPU (Triton).

Transformer Engine (2.20) gives each expert's product to cuBLAS by itself, also where one CUTLASS kernel computes the
products forward: the inner sizes, numbers of tokens, differ. A step over 12 layers of Qwen3-30B-A3B with two
micro-batches then launches 4,800 kernels for them, and the GPU waits for the host. This file can go when Transformer
Engine has one kernel for them: `is_module_grouped_tensor_path_supported` is true of Hopper from cuBLASLt 13.4 on.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.megatron.model.layers.experts.products import DTYPES
from rlframe.megatron.model.layers.experts.stacked import Stacked, described, on_device, stacked

ROWS, COLUMNS = 128, 128
"""Rows and columns of a gradient that a program computes. Those of experts must be multiples of them."""
TOKENS = 64
"""Tokens that it reads at once."""
WARPS, STAGES = 8, 3
"""Two programs share a multiprocessor, so that one multiplies while the other adds its sums."""
REDUCES = True
"""Whether the memory adds, so that sums need not be read. Triton's interpreter has no such operation."""
LEAST = (9, 0)
"""Compute capability of the first GPUs, of Hopper, that copy and add parts of a matrix by themselves."""
OF_WEIGHTS = "NT"
"""Transformer Engine's name for products of two matrices over their rows."""


def is_available() -> bool:
    """Returns whether this process's GPU has what the kernel is made of."""
    return torch.cuda.get_device_capability() >= LEAST


def install() -> None:
    """Lets Transformer Engine's layers of experts use the kernel, where it can take the place of their products."""
    from transformer_engine.pytorch.module import grouped_linear  # noqa: PLC0415 - not for Triton's interpreter

    own = grouped_linear.general_grouped_gemm
    if not hasattr(own, "__wrapped__"):
        grouped_linear.general_grouped_gemm = by_one_kernel(own)


def by_one_kernel(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Transformer Engine's `general_grouped_gemm` that leaves gradients of weights to the kernel."""

    @functools.wraps(own)
    def product(A: Any, B: Any, out: Any, *rest: Any, **options: Any) -> Any:  # noqa: N803 - as Transformer Engine has
        counts = options.get("m_splits")
        asked = options.get("layout") == OF_WEIGHTS and options.get("grad") and not options.get("use_bias")
        gradients = None if rest or not asked else taken(A, B, out, counts)
        if gradients is None:
            return own(A, B, out, *rest, **options)
        add_gradients(whole(A), whole(B), gradients, tuple(counts), adds=bool(options.get("accumulate")))
        return out, [None] * len(out), None

    return product


def taken(inputs: Sequence[Any], above: Sequence[Any], out: Sequence[Any], counts: Any) -> Stacked | None:
    """Returns the gradients that the kernel is to compute, if it can from these tensors: those of each expert behind
    those of the one before, at least one token, and gradients that `fits` returns True for."""
    if not isinstance(counts, list) or not len(inputs) == len(above) == len(out) == len(counts) or not sum(counts):
        return None
    # Quantised ones have classes of their own, of which some are no tensors.
    if not all(type(each) is Tensor for each in (*inputs, *above)):
        return None
    dtype = inputs[0].dtype
    if not all(each.dtype == dtype for each in (*inputs, *above)) or not (_follow(inputs) and _follow(above)):
        return None
    gradients = stacked(out)
    return gradients if gradients and fits(gradients, dtype) else None


def fits(gradients: Stacked, dtype: torch.dtype) -> bool:
    """Returns whether the kernel adds to gradients [O, I]: float32, multiples of its tiles.

    Args:
        dtype: of the tokens.
    """
    rows, columns = gradients.shape
    is_float32 = gradients.matrix.dtype == torch.float32
    return dtype in DTYPES and is_float32 and not (rows % ROWS or columns % COLUMNS)


def _follow(parts: Sequence[Tensor]) -> bool:
    """Returns whether each part lies in memory behind the one before, its rows too."""
    size = parts[0].shape[-1] * parts[0].element_size()
    return all(each.is_contiguous() for each in parts) and all(
        after.data_ptr() == before.data_ptr() + len(before) * size
        for before, after in pairwise(each for each in parts if len(each))
    )


def whole(parts: Sequence[Tensor]) -> Float[Tensor, "T F"]:
    """Returns the matrix [T, F] whose parts lie behind one another."""
    rows, columns = sum(map(len, parts)), parts[0].shape[-1]
    first = next((each for each in parts if len(each)), parts[0])
    return first.as_strided((rows, columns), (columns, 1))


def add_gradients(
    inputs: Float[Tensor, "T I"],
    above: Float[Tensor, "T O"],
    gradients: Stacked,
    counts: tuple[int, ...],
    *,
    adds: bool = True,
) -> None:
    """Adds to the gradient [O, I] of each expert's weight above^T inputs, over the expert's tokens: what came out was
    inputs weight^T.

    Args:
        inputs: [T, I] tokens by expert.
        above: [T, O] gradients of what came out of the experts.
        gradients: of each expert [O, I].
        counts: number of tokens of each expert.
        adds: False if the gradients are to be overwritten.
    """
    rows, columns = gradients.shape
    _add[(rows // ROWS * (columns // COLUMNS), gradients.count)](
        described(inputs, TOKENS, COLUMNS),
        described(above, TOKENS, ROWS),
        described(gradients.matrix, ROWS, COLUMNS),
        begins(counts, inputs.device),
        rows,
        columns,
        gradients.first,
        gradients.step,
        ADDS=adds,
        REDUCES=REDUCES,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TOKENS=TOKENS,
        num_warps=WARPS,
        num_stages=STAGES,
    )


@functools.lru_cache(maxsize=4)
def begins(counts: tuple[int, ...], device: torch.device) -> Int[Tensor, " E+1"]:
    """Returns [E + 1] the first token of each expert, and the number of all. Both products of a layer ask for them."""
    return on_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)


@triton.jit(do_not_specialize=["first", "step"])
def _add(
    of_inputs,
    of_above,
    of_gradients,
    begins,
    rows,
    columns,
    first,
    step,
    ADDS: tl.constexpr,
    REDUCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Computes a block of an expert's gradient. The first expert's is the gradient `first` in memory."""
    tile, expert = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(begins + expert), tl.load(begins + expert + 1)
    if ADDS and begin == end:
        return
    across = columns // COLUMNS
    row, col = (tile // across) * ROWS, (tile % across) * COLUMNS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    whole = end - (end - begin) % TOKENS
    for token in range(begin, whole, TOKENS):
        sums = tl.dot(of_above.load([token, row]).T, of_inputs.load([token, col]), sums)
    if whole < end:
        # The tokens behind are the next expert's, which may be infinite.
        inside = (whole + tl.arange(0, TOKENS) < end)[:, None]
        part = tl.where(inside, of_above.load([whole, row]), 0.0)
        rest = tl.where(inside, of_inputs.load([whole, col]), 0.0)
        sums = tl.dot(part.T, rest, sums)
    place = (first + step * expert) * rows + row
    if ADDS and REDUCES:
        of_gradients.atomic_add([place, col], sums)
    elif ADDS:
        of_gradients.store([place, col], sums + of_gradients.load([place, col]))
    else:
        of_gradients.store([place, col], sums)
