"""INT4 in groups: the experts of Kimi K2 Thinking, and others that compressed-tensors has packed.

Eight values of 4 bits lie in an int32, the lowest bits first, each with 8 added. The values of a group in a row share a
scale. weight = value * scale, in the scale's number format: compressed-tensors 0.17
`compressors.pack_quantized.PackedQuantizationCompressor.decompress`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlframe.models.quantized.base import Part, Quantization, finite, strips
from rlframe.utils.errors import CheckpointError

BITS = 4
PER_WORD = 32 // BITS
"""Number of values in an int32."""
OFFSET = 1 << (BITS - 1)
"""Number that is added to a value, so that it is not negative."""


class Int4(Quantization):
    """Groups of a number of columns, symmetric about 0."""

    suffixes = ("_packed", "_scale", "_shape")

    def __init__(self, group: int):
        self.group = group

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:-1], values[-1] * PER_WORD)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        *rows, columns = shape
        return (
            Part((*rows, -(-columns // PER_WORD)), ("I32",)),
            Part((*rows, -(-columns // self.group)), ("BF16", "F16", "F32"), finite),
            Part((len(shape),), ("I32", "I64"), lambda values: bool((values > 0).all())),
        )

    def read(self, names: Sequence[str], stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        columns = stored[0].shape[-1] * PER_WORD
        if columns % self.group:
            raise CheckpointError(
                f"tensor {names[0]} must have a multiple of group_size={self.group} columns, got {columns}: the file "
                "is garbled, or quantization_config in config.json is that of another model"
            )
        weight = super().read(names, stored, dtype)
        if stored[2].tolist() != list(weight.shape):
            said = f"tensor {names[2]} says {stored[2].tolist()}, and {names[0]} holds {list(weight.shape)}"
            raise CheckpointError(f"{said}: the file is garbled")
        return weight

    def dequantize(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        packed, scales, _ = stored
        weight = torch.empty(self.shape(tuple(packed.shape)), dtype=dtype)
        shifts = torch.arange(PER_WORD, dtype=torch.int32) * BITS
        rows, columns = weight.shape
        for strip in strips(0, rows, columns):
            values = ((packed[strip].unsqueeze(-1) >> shifts) & (2 * OFFSET - 1)) - OFFSET
            groups = values.view(values.shape[0], -1, self.group).to(scales.dtype)
            weight[strip] = (groups * scales[strip].unsqueeze(-1)).flatten(1)
        return weight
