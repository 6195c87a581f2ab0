"""FP8 in blocks: DeepSeek-V3 and R1, and the FP8 variants of Qwen3 and others.

A weight is float8_e4m3fn, and each block of it has a scale. weight = value * scale, multiplied in float32 and rounded
once. That is transformers 5.19 `integrations.finegrained_fp8.Fp8Dequantize._dequantize_one`, and for blocks that the
weight's end cuts, which transformers refuses, DeepSeek-V3 `inference/kernel.py` `weight_dequant`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlframe.models.quantized.base import Part, Quantization, finite, strips


class Fp8(Quantization):
    """Blocks of a number of rows and columns, or one scale for the whole weight."""

    suffixes = ("", "_scale_inv")
    ignored = ("activation_scale", "input_scale")

    def __init__(self, block: tuple[int, int] | None):
        self.block = block

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return values

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        scales: tuple[int, ...] = ()
        if self.block:
            # A weight has two axes, or three if experts are stacked.
            scales = (*shape[:-2], *(-(-size // block) for size, block in zip(shape[-2:], self.block, strict=False)))
        return Part(shape, ("F8_E4M3",), finite), Part(scales, ("F32", "BF16", "F16"), finite)

    def dequantize(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        values, scales = stored
        weight = torch.empty(values.shape, dtype=dtype)
        rows, columns = values.shape[-2:]
        height, width = self.block or (rows, columns)
        targets, sources = weight.view(-1, rows, columns), values.reshape(-1, rows, columns)
        grids = scales.float().reshape(-1, -(-rows // height), -(-columns // width))
        for target, source, grid in zip(targets, sources, grids.expand(len(targets), -1, -1), strict=True):
            for index, first in enumerate(range(0, rows, height)):
                spread = grid[index].repeat_interleave(width)[:columns]
                for strip in strips(first, min(first + height, rows), columns):
                    target[strip] = source[strip].float() * spread
        return weight
