"""The weights as engines that compute in FP8 receive them: matrices of layers as values and scales, in memory of their
own.

A rank quantises what it holds, so its part of a matrix must consist of whole blocks. Ranks that hold the same part then
have the same bits, and weight sync proves them as it does all tensors: the digest of what an engine holds is that of
the quantisation of what the trainer holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlframe.models.quantized import blocks
from rlframe.models.quantized.blocks import SCALE, SIZE, EngineFormat
from rlframe.models.quantized.fp8 import Fp8
from rlframe.utils.errors import WeightsDrifted, WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box, Region, matrix_shape
from rlframe.weight_sync.layout.memory import MemoryLayout, Parameter
from rlframe.weight_sync.proof.terms import distinct

if TYPE_CHECKING:
    from rlframe.models.quantized.fp8_kernels import QuantizeTable

ALIGNMENT = 64
"""Bytes at whose multiples parts begin."""
VALUES, SCALES = torch.float8_e4m3fn, torch.float32
ROUNDED = torch.bfloat16
"""Number format to which weights are rounded before they are quantised: the one in which engines compute, and to which
they round the tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A part of a matrix, as its parameter has it and as it is sent."""

    boxes: tuple[Box, ...]
    """The boxes of the parameter that make up the part, one below the other."""
    region: Region
    values: Tensor
    scales: Tensor


class QuantizedWeights:
    """This rank's weights in the form that engines hold. `update` quantises the present ones."""

    def __init__(self, layout: MemoryLayout, weights: Mapping[str, Tensor], engine_format: EngineFormat):
        """Allocates the memory and fills it: a byte for each weight of a matrix, and four for each block.

        Args:
            weights: the parameters that `layout` is about.

        Raises:
            WeightSyncFailed: this rank's part of a matrix cuts blocks.
        """
        self._weights, self._powers = weights, engine_format.powers_of_2
        self._fp8 = Fp8((SIZE, SIZE))
        parts = {name: list(_parts(name, layout)) for name in blocks.matrices(layout.boxes)}
        self._quantized, boxes = self._allocate(parts, _device(weights))
        kept = {name: mine for name, mine in layout.boxes.items() if name not in parts}
        names = {box.parameter for mine in kept.values() for box in mine}
        self.parameters = {name: weights[name] for name in weights if name in names}
        """The tensors that are sent, by name: whole parameters, and the quantised parts."""
        held = {name: layout.parameters[name] for name in self.parameters}
        for each in self._quantized:
            for name, part in zip(_names(each.boxes[0].tensor, each.region), (each.values, each.scales), strict=True):
                self.parameters[name] = part
                held[name] = Parameter(tuple(part.shape), part.dtype)
        tensors = blocks.stored(layout.tensors)
        every = kept | boxes
        self.layout = MemoryLayout(
            boxes={name: every[name] for name in tensors if name in every},
            tensors=tensors,
            parameters=held,
            padding=tuple(padding for padding in layout.padding if padding.parameter in self.parameters),
        )
        self._table, self._rest = None, self._quantized
        if self._quantized and self._quantized[0].values.is_cuda:
            self._table, self._rest = self._launch()
        self.update()

    def _launch(self) -> tuple["QuantizeTable | None", list[Quantized]]:
        """Returns the parts that one launch quantises, and the others."""
        from rlframe.models.quantized.fp8_kernels import QuantizeTable  # noqa: PLC0415 - Triton exists only with CUDA

        parts, rest = [], []
        for each in self._quantized:
            views = [box.view(self._weights) for box in each.boxes]
            whole = all(view.dtype is ROUNDED and view.stride(1) == 1 and view.shape[0] % SIZE == 0 for view in views)
            # Adapters are merged anew for each read.
            if not whole or not isinstance(self._weights, dict):
                rest.append(each)
                continue
            first = 0
            for view in views:
                end = first + view.shape[0]
                parts.append((view, each.values[first:end], each.scales[first // SIZE : end // SIZE]))
                first = end
        return QuantizeTable(parts, powers_of_2=self._powers) if parts else None, rest

    def _allocate(
        self, parts: Mapping[str, list[tuple[Region, tuple[Box, ...]]]], device: torch.device
    ) -> tuple[list[Quantized], dict[str, tuple[Box, ...]]]:
        """Returns the parts, with memory, and where they lie."""
        regions = [region for mine in parts.values() for region, _ in mine]
        values = _spaces([(region.rows, region.cols) for region in regions], VALUES, device)
        scales = _spaces([(region.rows // SIZE, region.cols // SIZE) for region in regions], SCALES, device)
        quantized: list[Quantized] = []
        boxes: dict[str, tuple[Box, ...]] = {}
        for name, mine in parts.items():
            for region, held in mine:
                each = Quantized(held, region, next(values), next(scales))
                quantized.append(each)
                value, scale = _names(name, region)
                cols = region.cols // SIZE
                boxes[name] = (*boxes.get(name, ()), Box(name, *region, value, 0, region.cols, 1))
                grid = Region(*(size // SIZE for size in region))
                boxes[name + SCALE] = (
                    *boxes.get(name + SCALE, ()),
                    Box(name + SCALE, *grid, scale, 0, cols, 1),
                )
        return quantized, boxes

    @torch.no_grad()
    def update(self) -> None:
        """Computes the quantisation of the present weights."""
        if self._table is not None:
            self._table.run()
        for each in self._rest:
            values, scales = self._of(each)
            each.values.copy_(values)
            each.scales.copy_(scales)

    @torch.no_grad()
    def require_current(self, rank: int) -> None:
        """Compares the quantisation of the present weights with what is sent.

        Raises:
            WeightsDrifted: they differ; the message names the tensor.
        """
        for each in self._quantized:
            values, scales = self._of(each)
            if not (_same(values, each.values) and _same(scales, each.scales)):
                raise WeightsDrifted(
                    f"rank {rank} sends engines {each.boxes[0].tensor} in FP8, and no longer holds the weight of which "
                    "that is the quantisation: one of them has changed, and not by training"
                )

    def _of(self, each: Quantized) -> tuple[Tensor, Tensor]:
        """Returns (values, scales) of the present weights of a part."""
        views = [box.view(self._weights) for box in each.boxes]
        weight = views[0] if len(views) == 1 else torch.cat(views)
        return self._fp8.quantize(weight.to(ROUNDED), powers_of_2=self._powers)


def _parts(name: str, layout: MemoryLayout) -> Iterator[tuple[Region, tuple[Box, ...]]]:
    """Yields this rank's parts of a matrix, each with its boxes from top to bottom.

    Raises:
        WeightSyncFailed: a part cuts blocks.
    """
    rows, cols = matrix_shape(layout.tensors[name])
    boxes, _ = distinct(layout.boxes[name])
    open_part: list[Box] = []
    for box in [*sorted(boxes, key=lambda box: (box.col, box.row)), None]:
        if open_part and (box is None or not _follows(open_part[-1], box)):
            first, last = open_part[0], open_part[-1]
            region = Region(first.row, last.row + last.rows - first.row, first.col, first.cols)
            if any(size % SIZE for size in region):
                end = f"{region.row + region.rows - 1}, columns {region.col}..{region.col + region.cols - 1}"
                raise WeightSyncFailed(
                    f"a rank of the trainer holds rows {region.row}..{end} of {name}, [{rows}, {cols}], which are not "
                    f"whole blocks of {SIZE} x {SIZE}, so it cannot quantise them; use a smaller tp in train.parallel"
                )
            yield region, tuple(open_part)
            open_part = []
        if box is not None:
            open_part.append(box)


def _follows(upper: Box, lower: Box) -> bool:
    """Returns whether `lower` begins where `upper` ends, in the same columns."""
    same = (upper.col, upper.cols) == (lower.col, lower.cols)
    return same and upper.row + upper.rows == lower.row


def _names(tensor: str, region: Region) -> tuple[str, str]:
    """Returns the names of the parameters with a part's values and scales."""
    place = f" {region.row}, {region.col}"
    return tensor + place, tensor + SCALE + place


def _spaces(shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Yields memory of these shapes, side by side in one storage, so that few handles reach it."""
    sizes = [-(-rows * cols * dtype.itemsize // ALIGNMENT) * ALIGNMENT for rows, cols in shapes]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device).view(dtype)
    for (rows, cols), part in zip(shapes, memory.split([size // dtype.itemsize for size in sizes]), strict=True):
        yield part[: rows * cols].view(rows, cols)


def _same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bits."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _device(weights: Mapping[str, Tensor]) -> torch.device:
    return next(iter(weights.values())).device
