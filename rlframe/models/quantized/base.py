"""The interface of a number format that stores a weight as several tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rlframe.utils.errors import CheckpointError

STRIP_BYTES = 1 << 24
"""Bytes of the rows that are computed at a time, in float32."""


class Part(NamedTuple):
    """One of the tensors that store a weight."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Number formats that it may have, as safetensors names them."""
    sound: Callable[[Tensor], bool] | None = None
    """Returns whether a piece of it holds values that a writer can have meant. None if all are."""


class Quantization(ABC):
    """A number format. The weight `name` is stored as the tensors `name + suffix`."""

    suffixes: ClassVar[tuple[str, ...]]
    """Ends of the names of a weight's tensors, that of the values first. It may be empty."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of tensors that are not needed for weights, such as scales of activations."""

    @abstractmethod
    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a weight whose values are stored in this shape."""

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Returns the tensors that store a weight of this shape, in the order of `suffixes`."""

    @abstractmethod
    def dequantize(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight in `dtype` from its tensors, which are those of `parts`."""

    def names(self, stored: Sequence[str]) -> list[str]:
        """Returns the names of the weights that tensors of these names store, sorted."""
        ends = tuple(suffix for suffix in self.suffixes if suffix)
        plain = {name for name in stored if not name.endswith(ends + self.ignored)}
        return sorted(plain | {name.removesuffix(end) for name in stored for end in ends if name.endswith(end)})

    def stored(self, name: str, present: Container[str]) -> tuple[str, ...]:
        """Returns the names of the tensors that store a weight: its own if it is not quantised."""
        names = tuple(name + suffix for suffix in self.suffixes)
        return names if any(each in present for each in names if each != name) else (name,)

    def bare(self, name: str, dtype: torch.dtype) -> str | None:
        """Returns why a tensor that is stored alone cannot be a weight, or None if it can."""
        values = {TORCH[each] for each in self.parts((1, 1))[0].dtypes}
        if self.suffixes[0] or dtype not in values:
            return None
        return f"tensor {name} is {str(dtype).removeprefix('torch.')} without its scales {name}{self.suffixes[1]}"

    def read(self, names: Sequence[str], stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight in `dtype` from its tensors.

        Args:
            names: of `stored`, for messages.

        Raises:
            CheckpointError: a tensor is not as the format stores it; the message names it.
        """
        for name, tensor, part in zip(names, stored, self.parts(self.shape(tuple(stored[0].shape))), strict=True):
            if tuple(tensor.shape) != part.shape:
                raise CheckpointError(f"tensor {name} must have shape {list(part.shape)}, got {list(tensor.shape)}")
            if tensor.dtype not in {TORCH[each] for each in part.dtypes}:
                raise CheckpointError(f"tensor {name} must be of {' or '.join(part.dtypes)}, got {tensor.dtype}")
            # The values themselves are many; `models.inspection` looks at a sample of them.
            if part.sound and name != names[0] and not part.sound(tensor):
                raise CheckpointError(f"tensor {name} holds values that no writer meant: the file is garbled")
        return self.dequantize(stored, dtype)


TORCH = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Number formats by the names that safetensors gives them."""


def finite(values: Tensor) -> bool:
    """Returns whether no value is infinite or NaN."""
    if not values.numel():
        return True
    # One pass without copies, a fiftieth of the time of `isfinite`: a NaN is the least and the greatest of its tensor.
    ends = torch.aminmax(values.float() if values.itemsize == 1 else values)
    return all(map(math.isfinite, map(float, ends)))


def strips(first: int, end: int, row_values: int) -> Iterator[slice]:
    """Yields the rows from `first` to `end` of a matrix in pieces of about STRIP_BYTES in float32."""
    count = max(1, STRIP_BYTES // (4 * row_values))
    for start in range(first, end, count):
        yield slice(start, min(start + count, end))
