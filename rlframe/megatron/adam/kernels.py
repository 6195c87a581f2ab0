"""Triton kernels over all tensors of a table, for AdamW and for the norm of gradients.

Transformer Engine's kernel (2.20) takes a list of at most 40 tensors of each kind at a time: 391 launches for 12 layers
of Qwen3-30B-A3B, 85 ms, where the bytes could move in 40, and 55 ms before the first of them in which the host makes
the lists.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
COLUMNS = 7
"""Number of columns of a table of int64: addresses of a tensor's gradient, its 16-bit weight, its main weight or the
bits that the weight lacks, and both moments; its number of elements; whether its gradient is part of the norm."""
BLOCK = 1024
"""Elements that a program updates at once."""
BLOCKS = 16
"""Times that it does."""
CHUNK = BLOCK * BLOCKS


@triton.jit
def update(
    table,
    chunks,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    correction1,
    correction2,
    scale,
    GRADIENTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    MOMENTS: tl.constexpr,
    REMAINDERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Takes a step for a chunk of a tensor. AdamW, Loshchilov and Hutter 2017 (arXiv 1711.05101, algorithm 2), in the
    order in which Transformer Engine computes:

        m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
        w = w - lr (m / correction1 / (sqrt(v / correction2) + eps) + weight_decay w),  correction = 1 - beta^t

    Args:
        scale: by which gradients are clipped.
        WEIGHTS: number format of 16 bits that is written beside a main weight. float32 if there is none.
        REMAINDERS: whether main weights are bfloat16 weights with the 16 bits that these lack.
        ALIGNED: whether all tensors begin at a multiple of 16 bytes.
    """
    chunk = chunks + tl.program_id(0).to(tl.int64) * 2
    row = table + tl.load(chunk).to(tl.int64) * COLUMNS
    begin = tl.load(chunk + 1).to(tl.int64) * BLOCK * BLOCKS
    gradients = tl.load(row).to(tl.pointer_type(GRADIENTS)) + begin
    weights = tl.load(row + 1).to(tl.pointer_type(tl.int16 if REMAINDERS else WEIGHTS)) + begin
    mains = tl.load(row + 2).to(tl.pointer_type(tl.int16 if REMAINDERS else tl.float32)) + begin
    firsts = tl.load(row + 3).to(tl.pointer_type(MOMENTS)) + begin
    seconds = tl.load(row + 4).to(tl.pointer_type(MOMENTS)) + begin
    if ALIGNED:
        gradients, weights, mains = (
            tl.multiple_of(gradients, 16),
            tl.multiple_of(weights, 16),
            tl.multiple_of(mains, 16),
        )
        firsts, seconds = tl.multiple_of(firsts, 16), tl.multiple_of(seconds, 16)
    left = tl.load(row + 5) - begin
    for block in range(BLOCKS):
        place = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= left:
            _update_block(
                gradients + place, weights + place, mains + place, firsts + place, seconds + place, None,
                lr, beta1, beta2, eps, weight_decay, correction1, correction2, scale, WEIGHTS, REMAINDERS,
            )  # fmt: skip
        elif block * BLOCK < left:
            _update_block(
                gradients + place, weights + place, mains + place, firsts + place, seconds + place, place < left,
                lr, beta1, beta2, eps, weight_decay, correction1, correction2, scale, WEIGHTS, REMAINDERS,
            )  # fmt: skip


@triton.jit
def _update_block(
    gradients,
    weights,
    mains,
    firsts,
    seconds,
    inside,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    correction1,
    correction2,
    scale,
    WEIGHTS: tl.constexpr,
    REMAINDERS: tl.constexpr,
):
    gradient = tl.load(gradients, mask=inside).to(tl.float32) * scale
    first = beta1 * tl.load(firsts, mask=inside).to(tl.float32) + (1 - beta1) * gradient
    second = beta2 * tl.load(seconds, mask=inside).to(tl.float32) + (1 - beta2) * gradient * gradient
    tl.store(firsts, first.to(firsts.dtype.element_ty), mask=inside)
    tl.store(seconds, second.to(seconds.dtype.element_ty), mask=inside)
    if REMAINDERS:
        # A weight is the main weight's upper half, rounded up where the lower half has its first bit set.
        upper, lower = tl.load(weights, mask=inside).to(tl.int32), tl.load(mains, mask=inside).to(tl.int32)
        upper = tl.where(lower < 0, upper - 1, upper)
        main = ((upper << 16) | (lower & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        main = tl.load(mains, mask=inside)
    size = tl.div_rn(tl.div_rn(first, correction1), tl.sqrt_rn(tl.div_rn(second, correction2)) + eps)
    main = main - lr * (size + weight_decay * main)
    if REMAINDERS:
        bits = main.to(tl.int32, bitcast=True)
        lower = bits.to(tl.int16)
        upper = bits >> 16
        upper = tl.where(lower < 0, upper + 1, upper)
        tl.store(weights, upper.to(tl.int16), mask=inside)
        tl.store(mains, lower, mask=inside)
    else:
        tl.store(mains, main, mask=inside)
        if WEIGHTS != tl.float32:
            tl.store(weights, main.to(WEIGHTS), mask=inside)


@triton.jit
def squares(
    table,
    chunks,
    sums,
    GRADIENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Writes [N] the sum of the squares of each chunk's gradient, 0 where it is not part of the norm."""
    program = tl.program_id(0).to(tl.int64)
    chunk = chunks + program * 2
    row = table + tl.load(chunk).to(tl.int64) * COLUMNS
    begin = tl.load(chunk + 1).to(tl.int64) * BLOCK * BLOCKS
    gradients = tl.load(row).to(tl.pointer_type(GRADIENTS)) + begin
    if ALIGNED:
        gradients = tl.multiple_of(gradients, 16)
    left = tl.where(tl.load(row + 6) != 0, tl.load(row + 5) - begin, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        place = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= left:
            part = tl.load(gradients + place).to(tl.float32)
            total += part * part
        elif block * BLOCK < left:
            part = tl.load(gradients + place, mask=place < left, other=0.0).to(tl.float32)
            total += part * part
    tl.store(sums + program, tl.sum(total, 0))
