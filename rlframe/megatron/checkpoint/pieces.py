"""Megatron's pieces of a training state as torch's distributed checkpoints plan them.

Megatron describes each piece as a part of a whole (`ShardedTensor`), or as an object by itself (`ShardedObject`). The
planners translate this to `torch.distributed.checkpoint`, from whose public planners they derive. The format is that of
Megatron's own `torch_dist` backend: a tensor's axes are those of the whole, an object is a list of one.
"""

import io
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlframe.megatron.checkpoint.metadata import require_plain
from rlframe.utils.errors import CheckpointError

Piece = ShardedTensor | ShardedObject


class SavePieces(DefaultSavePlanner):
    """Plans the writing of pieces that Megatron has checked: each once over all ranks, all pieces of a tensor
    together."""

    def __init__(self, pieces: Iterable[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        """Returns the writes of this rank."""
        self.plan = SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the data to write of a piece."""
        piece = self._pieces[index]
        return _with_all_axes(piece).contiguous() if isinstance(piece, ShardedTensor) else [piece.data]


class LoadPieces(DefaultLoadPlanner):
    """Plans the reading of pieces, each into its own tensor, whatever the layout in which the whole was written."""

    def __init__(self, pieces: Iterable[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors: dict[str, list[ShardedTensor]] = defaultdict(list)
        self._objects: set[str] = set()
        self.loaded: dict[str, Any] = {}
        """Objects by key, after they have been read."""
        for piece in pieces:
            if isinstance(piece, ShardedTensor):
                self._tensors[piece.key].append(piece)
            else:
                self._objects.add(piece.unique_key)

    def create_local_plan(self) -> LoadPlan:
        """Returns the reads of this rank.

        Raises:
            CheckpointingException: the checkpoint lacks a piece, has it in another shape, or has only part of it.
        """
        assert self.metadata is not None, "set up before"
        items = [_read_item(name) for name in sorted(self._objects) if _stored(self.metadata, name, kind=None)]
        for name, pieces in self._tensors.items():
            stored = _stored(self.metadata, name, kind=TensorStorageMetadata)
            for piece in pieces:
                if piece.allow_shape_mismatch:
                    # Rows beyond those that were written are padding.
                    assert piece.data is not None
                    piece.data.detach().zero_()
                elif tuple(stored.size) != tuple(piece.global_shape):
                    raise CheckpointingException(
                        f"{name} has the shape {tuple(stored.size)} there and {tuple(piece.global_shape)} here"
                    )
            reads = create_read_items_for_chunk_list(name, stored, [_chunk(piece) for piece in pieces])
            _require_all(name, pieces, reads)
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the target tensor of a read."""
        assert index.index is not None, "every read says which of the pieces it is for"
        return _with_all_axes(self._tensors[index.fqn][index.index])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Stores an object of the checkpoint if it consists of tensors and plain values."""
        name = read_item.dest_index.fqn
        try:
            held = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise CheckpointError(f"{name} is not plain values: {str(error).splitlines()[0]:.300}") from error
        if not isinstance(held, list) or len(held) != 1:
            raise CheckpointError(f"{name} is not a list of one object")
        (self.loaded[name],) = held
        # Transformer Engine keeps its state as the bytes of a pickle, none where there is no FP8.
        if isinstance(held[0], Tensor) and held[0].dtype is torch.uint8 and held[0].numel():
            require_plain(held[0].cpu().numpy().tobytes(), name=name)


def pieces_by_parameter(weights: dict[str, Any]) -> dict[Tensor, list[ShardedTensor]]:
    """Returns the saved pieces of each parameter: itself, or the parts of a fused one, such as gate and up."""
    pieces: dict[Tensor, list[ShardedTensor]] = {}
    for value in nested_values(weights):
        if isinstance(value, ShardedTensorFactory):
            pieces[value.data] = [part for part in nested_values(value.build()) if isinstance(part, ShardedTensor)]
        elif isinstance(value, ShardedTensor) and value.data is not None:
            pieces[value.data] = [value]
    return pieces


def _index(piece: Piece) -> MetadataIndex:
    return (
        MetadataIndex(piece.key, piece.global_offset)
        if isinstance(piece, ShardedTensor)
        else MetadataIndex(piece.unique_key)
    )


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    if not isinstance(piece, ShardedTensor):
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    values = _with_all_axes(piece)
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties.create_from_tensor(values),
            size=torch.Size(piece.global_shape),
        ),
    )


def _chunk(piece: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.global_offset), sizes=_with_all_axes(piece).shape)


def _with_all_axes(piece: ShardedTensor) -> Tensor:
    """Returns the values with the axes, of length one, that Megatron puts before them (layer, expert)."""
    assert piece.data is not None and piece.flattened_range is None, piece
    return piece.data.detach()[(None,) * piece.prepend_axis_num]


def _read_item(name: str) -> ReadItem:
    """Returns the read of an object, which has no extent."""
    none = torch.Size((0,))
    index = MetadataIndex(name)
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=index,
        dest_offsets=none,
        storage_index=index,
        storage_offsets=none,
        lengths=none,
    )


def _stored(metadata: Metadata, name: str, *, kind: type | None) -> Any:
    """Returns the checkpoint's description of an entry, which must be of `kind` if that is given."""
    try:
        stored = metadata.state_dict_metadata[name]
    except KeyError:
        raise CheckpointingException(f"it has no {name}") from None
    if kind is not None and not isinstance(stored, kind):
        raise CheckpointingException(f"{name} is an object there and a tensor here")
    return stored


def _require_all(name: str, pieces: list[ShardedTensor], reads: list[ReadItem]) -> None:
    """Raises an error unless the reads fill every piece, except those that may be shorter in the checkpoint."""
    filled = [0] * len(pieces)
    for read in reads:
        assert read.dest_index.index is not None
        filled[read.dest_index.index] += math.prod(read.lengths)
    for piece, count in zip(pieces, filled, strict=True):
        needed = _with_all_axes(piece).numel()
        if count != needed and not piece.allow_shape_mismatch:
            raise CheckpointingException(f"of {name} it has {count} of the {needed} values at {piece.global_offset}")
