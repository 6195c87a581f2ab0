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
        height, width = self.block or tuple(values.shape[-2:])
        matrices = [each.reshape(-1, *values.shape[-2:]) for each in (weight, values)]
        rows, columns = values.shape[-2:]
        grids = scales.float().reshape(matrices[0].shape[0] if self.block else 1, -(-rows // height), -1)
        for target, source, grid in zip(*matrices, grids.expand(matrices[0].shape[0], -1, -1), strict=True):
            for strip in strips(rows, columns, multiple=height):
                own = grid[strip.start // height : -(-strip.stop // height)]
                spread = own.repeat_interleave(height, 0)[: strip.stop - strip.start].repeat_interleave(width, 1)
                target[strip] = source[strip].float() * spread[:, :columns]
        return weight
