"""Parts of a decoder layer. Each knows its checkpoint tensors, its Megatron parameters, and how the tensors fill the
parameters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from rlframe.models.families.base import Architecture, Shard

Shapes = dict[str, tuple[int, ...]]


class Scope:
    """The tensors whose names begin with a prefix, by the rest of their names."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def within(self, prefix: str) -> "Scope":
        """Returns the tensors whose remaining names begin with `prefix`."""
        return Scope(self.tensors, self.prefix + prefix)


class LayerSpec(ABC):
    """A part of every layer, or of some layers. All names are relative to the layer: `self_attn.q_proj.weight`."""

    @abstractmethod
    def tensors(self, a: Architecture) -> Shapes:
        """Returns the shape of each Hugging Face tensor of the part, in the order of the model."""

    @abstractmethod
    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        """Returns the shape of each Megatron parameter of the part on a rank with this shard."""

    @abstractmethod
    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        """Fills the parameters, using views, `copy_` and `zero_` only."""


def under(prefix: str, shapes: Shapes) -> Shapes:
    """Returns the same shapes under longer names."""
    return {prefix + name: shape for name, shape in shapes.items()}


def rows(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Returns the rows of `tensor` that belong to `rank` of `size`."""
    return tensor.chunk(size)[rank]


def columns(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Returns the columns of `tensor` that belong to `rank` of `size`."""
    return tensor.chunk(size, dim=1)[rank]
