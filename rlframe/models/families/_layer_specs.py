"""What a decoder layer is put together from: parts that know their tensors, their parameters and how one fills the
other."""

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
        """Those of them whose names go on with `prefix`."""
        return Scope(self.tensors, self.prefix + prefix)


class LayerSpec(ABC):
    """A part of every layer, or of some. All names are relative to the layer: `self_attn.q_proj.weight`."""

    @abstractmethod
    def tensors(self, a: Architecture) -> Shapes:
        """Shape of each Hugging Face tensor of the part, in the order of the model."""

    @abstractmethod
    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        """Shape of each Megatron parameter of the part on a rank with this shard."""

    @abstractmethod
    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        """Fills the parameters, using views, `copy_` and `zero_` only."""


def under(prefix: str, shapes: Shapes) -> Shapes:
    """The same shapes under longer names."""
    return {prefix + name: shape for name, shape in shapes.items()}


def rows(tensor: Tensor, rank: int, size: int) -> Tensor:
    """The rows of `tensor` that `rank` of `size` has."""
    return tensor.chunk(size)[rank]


def columns(tensor: Tensor, rank: int, size: int) -> Tensor:
    """The columns of `tensor` that `rank` of `size` has."""
    return tensor.chunk(size, dim=1)[rank]
