"""Quantisation of many matrices in FP8 blocks in one launch, on a GPU (Triton); `Fp8.quantize` defines the bits.

A loop of torch's operations over the 18,432 experts' matrices of Qwen3-30B-A3B takes as many launches times ten. Here
the blocks of all matrices are rows of a table on the device, and one program reads a block once and writes it once.
Bits of values are made by integer arithmetic, so that they do not depend on how a compiler rounds.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlframe.models.quantized.blocks import SIZE
from rlframe.models.quantized.fp8 import LARGEST, SMALLEST_AMAX

_LARGEST, _SMALLEST_AMAX = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_AMAX)
_SHIFT = tl.constexpr(8388608.0)
"""2 ** 23: a number of that size has no digits after the point."""


@triton.jit
def _amax(weight):
    """Returns the largest absolute value of a block, by its bits: those of NaN are the largest, and `tl.max` would pass
    NaN over."""
    bits = tl.abs(weight).to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)


@triton.jit
def _scale(amax, POWERS: tl.constexpr):
    """Returns the scale of a block; see `fp8.block_scales`."""
    bounded = tl.maximum(amax, _SMALLEST_AMAX)
    if POWERS:
        # The exponent alone of 448 / amax. 2 ** -e has the exponent 254 - e in the bits of 2 ** e.
        exponent = tl.div_rn(_LARGEST + amax * 0, bounded).to(tl.int32, bitcast=True) >> 23
        scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(bounded, _LARGEST + amax * 0)
    # Neither of infinity nor of NaN.
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def _code(value):
    """Returns the bits of the float8_e4m3fn nearest to each number, of two as near the even one. NaN stays NaN."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(value), _LARGEST)
    held = magnitude.to(tl.int32, bitcast=True)
    # From 2 ** -6 on: 3 of 23 digits stay, and the exponent counts from 7 instead of 127.
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)
    # Below, multiples of 2 ** -9.
    small = (magnitude * 512.0 + _SHIFT).to(tl.int32, bitcast=True) & 15
    code = tl.where(magnitude < 0.015625, small, normal)
    return tl.where(value == value, code | ((bits >> 24) & 128), 127).to(tl.uint8)


@triton.jit
def _quantize(boxes, tiles, SIZE: tl.constexpr, POWERS: tl.constexpr):
    """Computes the values and the scale of one block."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    box = boxes + tl.load(tile).to(tl.int64) * 6
    down, across = tl.load(tile + 1).to(tl.int64), tl.load(tile + 2).to(tl.int64)
    source = tl.load(box).to(tl.pointer_type(tl.bfloat16))
    values = tl.load(box + 2).to(tl.pointer_type(tl.uint8))
    scales = tl.load(box + 4).to(tl.pointer_type(tl.float32))
    row = (down * SIZE + tl.arange(0, SIZE)).to(tl.int64)[:, None]
    col = (across * SIZE + tl.arange(0, SIZE)).to(tl.int64)[None, :]
    weight = tl.load(source + row * tl.load(box + 1) + col).to(tl.float32)
    scale = _scale(_amax(weight), POWERS)
    tl.store(values + row * tl.load(box + 3) + col, _code(tl.div_rn(weight, scale + weight * 0)))
    tl.store(scales + down * tl.load(box + 5) + across, scale)


class QuantizeTable:
    """Matrices, ready to be quantised at their places. The memory must not move."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]], *, powers_of_2: bool):
        """
        Args:
            parts: (weight, values, scales) of each matrix of whole blocks: bfloat16, float8_e4m3fn and float32. Columns
                of each are contiguous.
        """
        device = parts[0][0].device
        boxes = [
            (
                weight.data_ptr(),
                weight.stride(0),
                values.data_ptr(),
                values.stride(0),
                scales.data_ptr(),
                scales.stride(0),
            )
            for weight, values, scales in parts
        ]
        # The tables hold addresses, so their owner keeps the memory alive.
        self._parts, self._powers = parts, powers_of_2
        self._boxes = torch.tensor(boxes, dtype=torch.int64).to(device)
        self._tiles = torch.from_numpy(_tiles([tuple(scales.shape) for _, _, scales in parts])).to(device)

    def run(self) -> None:
        """Launches the kernel on the current stream."""
        kernel: Any = _quantize
        kernel[(len(self._tiles),)](self._boxes, self._tiles, SIZE=SIZE, POWERS=self._powers, num_warps=8)


def _tiles(shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns [blocks, 3] int32 (matrix, row and column of the block)."""
    rows, cols = np.array(shapes, dtype=np.int64).T
    counts = rows * cols
    matrix = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(matrix)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([matrix, index // cols[matrix], index % cols[matrix]], axis=1).astype(np.int32)
