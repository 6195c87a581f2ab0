"""FP8 in blocks: DeepSeek-V3 and R1, and the FP8 variants of Qwen3 and others.

A weight is float8_e4m3fn, and each block of it has a scale. weight = value * scale, multiplied in float32 and rounded
once. That is transformers 5.19 `integrations.finegrained_fp8.Fp8Dequantize._dequantize_one`, and for blocks that the
weight's end cuts, which transformers refuses, DeepSeek-V3 `inference/kernel.py` `weight_dequant`.

`quantize` is its inverse: scale = amax / 448 in float32, and value = weight / scale, rounded to the nearest
(DeepSeek-V3, arXiv 2412.19437, section 3.3). With `powers_of_2` a scale is rounded up to a power of two, by the rule of
Transformer Engine 2.20 `recipe_common.cuh` `compute_scale_from_amax`, whose blockwise recipe does so.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlframe.models.quantized.base import Part, Quantization, finite, strips

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
SMALLEST_AMAX = LARGEST * 2.0**-126
"""Least maximum of a block that its scale follows. Scales below would not be normal numbers."""


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

    def quantize(self, weight: Tensor, *, powers_of_2: bool = False) -> tuple[Tensor, Tensor]:
        """Returns (values, scales) of a matrix of whole blocks."""
        assert self.block is not None, "one scale for the whole weight is only read"
        height, width = self.block
        rows, columns = (size // block for size, block in zip(weight.shape, self.block, strict=True))
        assert weight.shape == (rows * height, columns * width), "whole blocks"
        values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        scales = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
        for strip in strips(0, rows, height * columns * width):
            part = slice(strip.start * height, strip.stop * height)
            blocks = weight[part].float().reshape(-1, height, columns, width)
            scale = block_scales(blocks.abs().amax((1, 3)), powers_of_2=powers_of_2)
            # A maximum divided by its rounded scale may exceed the largest number, which float8 would make NaN.
            scaled = (blocks / scale[:, None, :, None]).clamp_(-LARGEST, LARGEST)
            values[part] = scaled.view(-1, columns * width).to(torch.float8_e4m3fn)
            scales[strip] = scale
        return values, scales


def block_scales(amax: Tensor, *, powers_of_2: bool) -> Tensor:
    """Returns the scales of blocks from their largest absolute values, in float32. A block of zeros has 1. One with a
    number that is not finite has NaN: it would become 448 times the scale, and the engine would go on with it."""
    bounded = amax.clamp(min=SMALLEST_AMAX)
    if powers_of_2:
        exponents = torch.frexp(LARGEST / bounded).exponent
        scale = torch.ldexp(torch.ones_like(amax), 1 - exponents)
    else:
        # By a tensor: torch computes x / 448 on a GPU as x * (1 / 448), which rounds twice.
        scale = bounded / torch.full_like(bounded, LARGEST)
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))
