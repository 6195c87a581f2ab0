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
from triton.tools.tensor_descriptor import TensorDescriptor

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
        if rest or not asked or not takes(A, B, out, counts):
            return own(A, B, out, *rest, **options)
        add_gradients(whole(A), whole(B), out, counts, adds=bool(options.get("accumulate")))
        return out, [None] * len(out), None

    return product


def takes(inputs: Sequence[Any], above: Sequence[Any], out: Sequence[Any], counts: Any) -> bool:
    """Returns whether the kernel computes gradients of weights from these tensors: those of each expert behind those of
    the one before, at least one token, and gradients that `fits` returns True for."""
    if not isinstance(counts, list) or not len(inputs) == len(above) == len(out) == len(counts):
        return False
    # Quantised ones have classes of their own, of which some are no tensors.
    if not all(type(each) is Tensor for each in (*inputs, *above)):
        return False
    dtype = inputs[0].dtype
    return (
        sum(counts) > 0
        and all(each.dtype == dtype for each in (*inputs, *above))
        and _follow(inputs)
        and _follow(above)
        and fits(out, dtype)
    )


def fits(gradients: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Returns whether the kernel adds to gradients [O, I]: float32, at a `distance` from each other, multiples of its
    tiles.

    Args:
        dtype: of the tokens.
    """
    rows, columns = gradients[0].shape
    return (
        dtype in (torch.bfloat16, torch.float16)
        and not (rows % ROWS or columns % COLUMNS)
        and all(each.dtype == torch.float32 and each.is_contiguous() for each in gradients)
        and distance(gradients) is not None
    )


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


def distance(gradients: Sequence[Tensor]) -> int | None:
    """Returns 1 if gradients lie in memory one behind the other, -1 if in the opposite order, as Megatron's buffer has
    them, and None if otherwise."""
    size = gradients[0].numel() * gradients[0].element_size()
    found = {after.data_ptr() - before.data_ptr() for before, after in pairwise(gradients)} or {size}
    return {size: 1, -size: -1}.get(found.pop()) if len(found) == 1 else None


def add_gradients(
    inputs: Float[Tensor, "T I"],
    above: Float[Tensor, "T O"],
    gradients: Sequence[Float[Tensor, "O I"]],
    counts: Sequence[int],
    *,
    adds: bool = True,
) -> None:
    """Adds to the gradient [O, I] of each expert's weight above^T inputs, over the expert's tokens: what came out was
    inputs weight^T.

    Args:
        inputs: [T, I] tokens by expert.
        above: [T, O] gradients of what came out of the experts.
        gradients: at a `distance` from each other.
        counts: number of tokens of each expert.
        adds: False if the gradients are to be overwritten.
    """
    (rows, columns), step = gradients[0].shape, distance(gradients)
    assert step is not None, "`takes` was asked"
    all_of_them = gradients[0 if step == 1 else -1].as_strided((len(counts) * rows, columns), (columns, 1))
    _add[(rows // ROWS * (columns // COLUMNS), len(counts))](
        _described(inputs, TOKENS, COLUMNS),
        _described(above, TOKENS, ROWS),
        _described(all_of_them, ROWS, COLUMNS),
        begins(tuple(counts), inputs.device),
        rows,
        columns,
        0 if step == 1 else len(counts) - 1,
        step,
        ADDS=adds,
        REDUCES=REDUCES,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TOKENS=TOKENS,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns what the GPU's copying of parts [rows, columns] needs to know."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@functools.lru_cache(maxsize=4)
def begins(counts: tuple[int, ...], device: torch.device) -> Int[Tensor, " E+1"]:
    """Returns [E + 1] the first token of each expert, and the number of all. Both products of a layer ask for them."""
    found = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)


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
