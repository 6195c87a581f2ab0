"""MXFP4: the experts of GPT-OSS.

32 values of 4 bits (1 sign, 2 exponent, 1 mantissa) share a scale, which is a power of two (OCP Microscaling Formats
1.0, sections 5.3.3 and 6.3). weight = value * 2 ** (scale - 127), which bfloat16 holds exactly. The layout is that of
transformers 5.19 `integrations.mxfp4._convert_moe_packed_tensors`: two values a byte, the low half first, and the axes
of inputs and outputs swapped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlframe.models.quantized.base import Part, Quantization, strips

BLOCK = 32
"""Number of values that share a scale."""
BIAS = 127
"""Exponent that is stored for a scale of 1."""
NAN = 255
"""Scale that means NaN."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by their bits. With the highest bit set they are negative."""


class Mxfp4(Quantization):
    """Stacked experts [E, rows, columns / 32, 16], whose weight is [E, columns, rows]."""

    suffixes = ("_blocks", "_scales")

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        *experts, rows, blocks, _ = values if len(values) >= 3 else (*values, 1, 1, 1)
        return (*experts, blocks * BLOCK, rows)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        *experts, columns, rows = shape
        scales = (*experts, rows, -(-columns // BLOCK))
        return Part((*scales, BLOCK // 2), ("U8",)), Part(scales, ("U8",), lambda values: not (values == NAN).any())

    def dequantize(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        blocks, scales = stored
        weight = torch.empty(self.shape(tuple(blocks.shape)), dtype=dtype)
        values = torch.tensor([*POSITIVE, *(-each for each in POSITIVE)])
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)
        # 2 ** 128 is NAN's and becomes infinity.
        powers = torch.tensor([2.0 ** (exponent - BIAS) for exponent in range(256)], dtype=torch.float64).float()
        columns, rows = weight.shape[-2:]
        for target, source, exponents in zip(
            weight.reshape(-1, columns, rows),
            blocks.reshape(-1, rows, *blocks.shape[-2:]),
            scales.reshape(-1, rows, scales.shape[-1]),
            strict=True,
        ):
            for strip in strips(0, rows, columns):
                found = pairs[source[strip].int()].flatten(-2) * powers[exponents[strip].int()].unsqueeze(-1)
                target[:, strip] = found.flatten(-2).t()
        return weight
