"""MemoryLayout: the position of every part of every Hugging Face tensor in this process's memory.

A layout is never written by hand. `record` runs a loader once on meta tensors and records every copy. Loading replays
the recording forwards, exporting replays it backwards, and weight sync and digests use the same boxes.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box, Padding, matrix_shape, window

ATEN = torch.ops.aten

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type with the bits of an element, by its number of bytes."""
Loader = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
"""`load(parameters, checkpoint)`: fills parameters from Hugging Face tensors. Uses only views, copy_ and zero_."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Properties of a parameter that a layout needs besides its boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MemoryLayout:
    """Every part of every Hugging Face tensor on this rank. Plain data that can be pickled."""

    boxes: dict[str, tuple[Box, ...]]
    """Boxes by Hugging Face name. A tensor of which this rank holds nothing is absent."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of every tensor of the checkpoint, whether or not this rank holds part of it."""
    parameters: dict[str, Parameter]
    padding: tuple[Padding, ...] = ()

    def dtype(self, tensor: str) -> torch.dtype:
        """Returns the number format in which this rank holds `tensor`."""
        return self.parameters[self.boxes[tensor][0].parameter].dtype


def record(load: Loader, parameters: Mapping[str, Tensor], tensors: Mapping[str, tuple[int, ...]]) -> MemoryLayout:
    """Returns the layout that `load` gives to `parameters`. No data is read or written.

    Args:
        parameters: this rank's parameters by name; only shape, strides and dtype matter.
        tensors: shape of every Hugging Face tensor by name.

    Raises:
        WeightSyncFailed: the loader uses an operation that is no view, copy_ or zero_ (named), leaves elements of a
            parameter unfilled, or fills some twice.
    """
    twins = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for name, value in parameters.items()
    }
    recorder = _Recorder(twins, tensors)
    with torch.no_grad(), recorder:
        load(twins, recorder.checkpoint)
    return recorder.layout()


def record_loader(
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    sparse: bool = False,
) -> MemoryLayout:
    """Returns the layout that an engine's own `load` gives to the engine's own `parameters`.

    The loader runs once over meta tensors. Copies into the parameters are recorded but not executed, so that no element
    is read or written.

    Args:
        load: takes (name, tensor) pairs and writes into `parameters`, which it finds by itself.
        dtypes: number formats of tensors that have not that of the first parameter.
        sparse: leave parameters of which the loader fills nothing out of the layout.

    Raises:
        WeightSyncFailed: as `record`; or two parameters lie in one storage.
    """
    recorder = _Recorder(parameters, tensors, dtypes)
    with torch.no_grad(), recorder:
        load(iter(recorder.checkpoint.items()))
    return recorder.layout(sparse=sparse)


def load_tensor(layout: MemoryLayout, parameters: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    """Writes this rank's parts of the Hugging Face tensor `name` into the parameters, cast to their dtype.

    Raises:
        WeightSyncFailed: `value` has another shape than the recording.
    """
    matrix = _matrix(layout, name, value)
    for box in layout.boxes.get(name, ()):
        box.view(parameters).copy_(matrix[box.row : box.row + box.rows, box.col : box.col + box.cols])


def export_tensor(layout: MemoryLayout, parameters: Mapping[str, Tensor], name: str, out: Tensor) -> None:
    """Writes the parts of `name` that this rank holds into `out`, a full contiguous tensor, and leaves the rest.

    Raises:
        WeightSyncFailed: `out` has another shape than the recording.
    """
    matrix = _matrix(layout, name, out)
    for box in layout.boxes.get(name, ()):
        matrix[box.row : box.row + box.rows, box.col : box.col + box.cols].copy_(box.view(parameters))


def identity_layout(parameters: Mapping[str, Tensor]) -> MemoryLayout:
    """Returns the layout of a checkpoint whose tensors are the parameters themselves."""

    def load(held: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
        for name, value in held.items():
            value.copy_(checkpoint[name])

    return record(load, parameters, {name: tuple(value.shape) for name, value in parameters.items()})


def joined(layout: MemoryLayout, other: MemoryLayout, *, parameters: Mapping[str, str]) -> MemoryLayout:
    """Returns the layout of a rank that holds `layout`, and some parameters of `other` beside it. A tensor that both
    hold is held twice, which digests know.

    Args:
        parameters: the names in the result of those parameters of `other`.
    """
    boxes = dict(layout.boxes)
    for name, theirs in other.boxes.items():
        mine = tuple(replace(box, parameter=parameters[box.parameter]) for box in theirs if box.parameter in parameters)
        if mine:
            boxes[name] = (*boxes.get(name, ()), *mine)
    tensors = layout.tensors | other.tensors
    padding = (
        replace(each, parameter=parameters[each.parameter]) for each in other.padding if each.parameter in parameters
    )
    return MemoryLayout(
        boxes={name: boxes[name] for name in tensors if name in boxes},
        tensors=tensors,
        parameters=layout.parameters | {new: other.parameters[old] for old, new in parameters.items()},
        padding=(*layout.padding, *padding),
    )


def clear_padding(layout: MemoryLayout, parameters: Mapping[str, Tensor]) -> None:
    """Zeroes the padding that no tensor fills."""
    for padding in layout.padding:
        _padding(padding, parameters).zero_()


def dirty_padding(layout: MemoryLayout, parameters: Mapping[str, Tensor]) -> str | None:
    """Returns the first parameter with padding whose bits are not all 0, or None."""
    if not layout.padding:
        return None
    # Bits, not values: -0.0 is not what clear_padding writes.
    windows = [_padding(padding, parameters) for padding in layout.padding]
    dirty = torch.stack([part.view(INTEGERS[part.dtype.itemsize]).any() for part in windows]).tolist()
    return next((part.parameter for part, wrong in zip(layout.padding, dirty, strict=True) if wrong), None)


def _padding(padding: Padding, parameters: Mapping[str, Tensor]) -> Tensor:
    return window(parameters[padding.parameter], padding.offset, padding.size, padding.stride)


def _matrix(layout: MemoryLayout, name: str, value: Tensor) -> Tensor:
    if tuple(value.shape) != layout.tensors[name]:
        raise WeightSyncFailed(f"{name} has shape {list(value.shape)}, recorded was {list(layout.tensors[name])}")
    return value.detach().view(matrix_shape(layout.tensors[name]))


class _Strided(NamedTuple):
    """A view of the twin `name`, in elements from its first."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Axis(NamedTuple):
    """One loop of a copy: `count` steps of `source` elements in the tensor, `target` elements in the parameter."""

    count: int
    source: int
    target: int


class _Recorder(TorchDispatchMode):
    """Records copies of a loader from meta tensors into parameters, and executes none of them."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        tensors: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype] | None = None,
    ):
        super().__init__()
        # A loader that casts to the parameter's dtype casts to the dtype it already has, which is not a copy.
        dtype = next((value.dtype for value in parameters.values()), torch.float32)
        known = dtypes or {}
        self.checkpoint = {
            name: torch.empty(shape, dtype=known.get(name, dtype), device="meta") for name, shape in tensors.items()
        }
        self._parameters, self._tensors = parameters, tensors
        self._copies: list[tuple[_Strided, _Strided]] = []
        self._zeros: list[_Strided] = []
        self._owners: dict[int, tuple[str, int]] = {}
        """By storage: the name of the parameter or tensor in it, and its start in the storage."""
        for name, value in itertools.chain(parameters.items(), self.checkpoint.items()):
            owner = self._owners.setdefault(value.untyped_storage()._cdata, (name, int(value.storage_offset())))
            if owner[0] != name:
                raise WeightSyncFailed(f"parameters {owner[0]} and {name} lie in one storage")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns True, so that nothing is compiled while a loader is recorded. torch 2.13 would import its compiler
        for each mode that may be compiled, which takes seconds in a fresh process."""
        return False

    def layout(self, *, sparse: bool = False) -> MemoryLayout:
        """Returns the recorded layout after the loader has run.

        Args:
            sparse: see `record_loader`.

        Raises:
            WeightSyncFailed: elements of a parameter are unfilled, or filled twice.
        """
        by_tensor: dict[str, dict[Box, None]] = defaultdict(dict)
        for source, target in self._copies:
            by_tensor[source.name].update(dict.fromkeys(_boxes(source, target, self._tensors[source.name])))
        padding = tuple(Padding(zero.name, zero.offset, zero.size, zero.stride) for zero in self._zeros)
        written = list(itertools.chain.from_iterable(by_tensor.values()))
        filled = {each.parameter for each in (*written, *padding)}
        held = {name: value for name, value in self._parameters.items() if name in filled or not sparse}
        _check_coverage(held, written, padding)
        return MemoryLayout(
            boxes={name: tuple(by_tensor[name]) for name in self._tensors if by_tensor.get(name)},
            tensors={name: tuple(shape) for name, shape in self._tensors.items()},
            parameters={name: Parameter(tuple(value.shape), value.dtype) for name, value in held.items()},
            padding=padding,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ATEN.copy_.default:
            target, source = args[:2]
            # copy_ repeats a source with fewer elements; the stride 0 that expand gives it is refused later.
            source = self._strided(source.expand(target.shape), self.checkpoint, func)
            self._copies.append((source, self._strided(target, self._parameters, func)))
            return target
        if func is ATEN.zero_.default or (func is ATEN.fill_.Scalar and args[1] == 0):
            if args[0].numel():
                self._zeros.append(self._strided(args[0], self._parameters, func))
            return args[0]
        if not func.is_view:
            leaves = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            known = [self._owners.get(value.untyped_storage()._cdata) for value in leaves]
            # Operations that touch neither side, such as on a table of expert indices, are of no interest.
            if names := [owner[0] for owner in known if owner]:
                raise WeightSyncFailed(
                    f"the loader of {', '.join(names)} uses {func}, which is not a view, copy_ or zero_, so where its "
                    "elements land cannot be recorded"
                )
        return func(*args, **(kwargs or {}))

    def _strided(self, view: Tensor, side: Mapping[str, Tensor], func: Any) -> _Strided:
        name, start = self._owners.get(view.untyped_storage()._cdata, (None, 0))
        if name is None or name not in side:
            raise WeightSyncFailed(
                f"the loader calls {func} on a tensor that is neither a parameter nor a view of the checkpoint: "
                f"shape {list(view.shape)}"
            )
        return _Strided(name, int(view.storage_offset()) - start, tuple(view.shape), view.stride())


def _boxes(source: _Strided, target: _Strided, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields the copy as few boxes. Axes that move along rows and along columns are joined if both sides allow it. One
    of each becomes the box; the others are enumerated (such as the KV groups of a fused QKV)."""
    columns = matrix_shape(shape)[1]
    axes = [
        axis
        for raw in zip(source.size, source.stride, target.stride, strict=True)
        for axis in _cut_at_rows(_Axis(*raw), columns, source.name)
        if axis.count != 1
    ]
    if any(axis.count == 0 for axis in axes):
        return
    col_axes = _join([axis for axis in axes if axis.source % columns])
    row_axes = _join([axis for axis in axes if axis.source % columns == 0])
    first_col = source.offset % columns
    if any(axis.source == 0 for axis in axes):
        raise WeightSyncFailed(f"the loader of {target.name} repeats elements of {source.name}")
    if first_col + sum((axis.count - 1) * axis.source for axis in col_axes) >= columns:
        raise WeightSyncFailed(f"the loader of {target.name} reads {source.name} across the ends of its rows")
    cols = col_axes.pop() if col_axes and col_axes[-1].source == 1 else _Axis(1, 1, 1)
    rows = (
        row_axes.pop() if row_axes and row_axes[-1].source == columns else _Axis(1, columns, cols.count * cols.target)
    )
    rest = row_axes + col_axes
    for steps in itertools.product(*(range(axis.count) for axis in rest)):
        read = source.offset + sum(step * axis.source for step, axis in zip(steps, rest, strict=True))
        write = target.offset + sum(step * axis.target for step, axis in zip(steps, rest, strict=True))
        row, col = divmod(read, columns)
        yield Box(source.name, row, rows.count, col, cols.count, target.name, write, rows.target, cols.target)


def _cut_at_rows(axis: _Axis, columns: int, tensor: str) -> list[_Axis]:
    """Returns the axis. If it crosses the ends of rows, returns one axis of rows and one of columns."""
    count, source, target = axis
    if source >= columns or (count - 1) * source < columns:
        if source > columns and source % columns and count > 1:
            raise WeightSyncFailed(
                f"{tensor} is read in steps of {source} elements, which is not a whole number of rows"
            )
        return [axis]
    per_row = columns // source if source else 0
    if source == 0 or columns % source or count % per_row:
        raise WeightSyncFailed(f"{tensor} is read in {count} steps of {source} elements over rows of {columns}")
    return [_Axis(count // per_row, columns, per_row * target), _Axis(per_row, source, target)]


def _join(axes: list[_Axis]) -> list[_Axis]:
    """Returns the same loops as few axes, the smallest source step last."""
    joined: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: -axis.source):
        outer = joined[-1] if joined else None
        if outer and outer.source == axis.count * axis.source and outer.target == axis.count * axis.target:
            joined[-1] = _Axis(outer.count * axis.count, axis.source, axis.target)
        else:
            joined.append(axis)
    return joined


def _check_coverage(parameters: Mapping[str, Tensor], boxes: Iterable[Box], padding: tuple[Padding, ...]) -> None:
    """Refuses a recording in which an element of a parameter is not filled exactly once."""
    writes: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for box in boxes:
        writes[box.parameter].append((box.offset, (box.rows, box.cols), (box.row_stride, box.col_stride)))
    for part in padding:
        writes[part.parameter].append((part.offset, part.size, part.stride))
    for name, parameter in parameters.items():
        unit, counts = _count_writes(parameter, writes[name])
        total = counts.numel() * unit
        if missing := int((counts == 0).sum()) * unit:
            raise WeightSyncFailed(f"parameter {name}: {missing} of {total} elements are neither loaded nor zeroed")
        if double := int((counts > 1).sum()) * unit:
            raise WeightSyncFailed(f"parameter {name}: {double} of {total} elements are written more than once")


def _count_writes(parameter: Tensor, writes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> tuple[int, Tensor]:
    """Returns (unit, number of writes of each unit of the parameter). Writes are counted per unit, the longest run that
    no write splits (usually whole rows), so that the cost does not grow with the width of the model."""
    dense = parameter.is_contiguous()
    unit = parameter.numel() if dense else 1
    for offset, size, stride in writes:
        inner = size[-1] if stride and stride[-1] == 1 else 1
        steps = [step for count, step in zip(size[:-1], stride[:-1], strict=True) if count > 1]
        unit = math.gcd(unit, offset, inner, *steps)
    unit = max(unit, 1)
    span = 1 + sum((count - 1) * step for count, step in zip(parameter.shape, parameter.stride(), strict=True))
    counts = torch.zeros((parameter.numel() if dense else span) // unit, dtype=torch.int16)
    for offset, size, stride in writes:
        if stride and stride[-1] == 1:
            size = (*size[:-1], size[-1] // unit)
            stride = (*(step // unit for step in stride[:-1]), 1)
        counts.as_strided(size, stride, offset // unit).add_(1)
    return unit, counts if dense else counts.as_strided(parameter.shape, parameter.stride())
