"""Reads Megatron's distributed checkpoints without unpickling anything.

Megatron 0.16.1's own backend reads `.metadata` with pickle, objects beside tensors with `weights_only=False`, and
`common.pt`, which is not needed here. So `dist_checkpointing.load` gets strategies, its extension point, from this
file. They read through `torch.distributed.checkpoint.load`, with a storage reader that treats `.metadata` as data and a
planner that accepts only plain values as objects. torch reads tensors with `weights_only=True`.
"""

import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata

from rlframe.megatron.checkpoint.metadata import read_metadata
from rlframe.megatron.checkpoint.pieces import LoadPieces, Piece
from rlframe.utils.errors import CheckpointError

BACKEND = "torch_dist"


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint whose `.metadata` is treated as data."""

    def __init__(self, folder: Path):
        """Reads `.metadata`. Raises CheckpointError as `metadata.read_metadata` does."""
        require_backend(folder)
        super().__init__(folder)
        self.metadata = read_metadata(folder)

    @property
    def names(self) -> set[str]:
        """The names of all entries of the checkpoint: tensors and objects."""
        return set(self.metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata. torch requests that of a single rank only if there is none for all."""
        return self.metadata


def load(state: dict[str, Any], reader: Reader, *, whole: bool) -> dict[str, Any]:
    """Returns `state` with the checkpoint's values; see `dist_checkpointing.load`. All ranks must call it.

    Args:
        whole: whether all ranks together request whole tensors, which is checked.
    """
    loaded = dist_checkpointing.load(
        state,
        str(reader.path),
        sharded_strategy=_Pieces(reader),
        common_strategy=_NothingInCommon(),
        validate_access_integrity=whole,
    )
    assert isinstance(loaded, dict), "other forms are returned on request only"
    return loaded


def require_backend(folder: Path) -> None:
    """Raises CheckpointError unless `metadata.json` in `folder` names the one supported format."""
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not what Megatron writes beside a distributed checkpoint: {error}") from error
    if backend != BACKEND:
        raise CheckpointError(f"{path} must name sharded_backend {BACKEND!r}, got {backend!r:.80}")


class _EveryVersion:
    """Accepts any format, because `require_backend` has checked it."""

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Accepts every format."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Accepts every version."""


class _Pieces(_EveryVersion, LoadShardedStrategy):
    """Reads tensors and objects."""

    can_handle_sharded_objects = True

    def __init__(self, reader: Reader):
        self._reader = reader

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Reads every piece into its own tensor. Returns the tensors and objects in place of the pieces."""
        planner = LoadPieces(nested_values(sharded_state_dict))
        # The planner holds what is read into; torch needs nothing beside it.
        dcp.load({}, storage_reader=self._reader, planner=planner)

        def value_of(piece: Piece) -> Any:
            return piece.data if isinstance(piece, ShardedTensor) else planner.loaded[piece.unique_key]

        return dict_list_map_outplace(value_of, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        """Raises an error, because nothing calls it: `Reader.names` lists the contents of a checkpoint."""
        raise AssertionError("nothing here asks for it")


class _NothingInCommon(_EveryVersion, LoadCommonStrategy):
    """Leaves `common.pt` unread, because the run's state has everything that is not a tensor."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Raises an error, because nothing calls it: the format keeps objects with the tensors."""
        raise AssertionError("torch_dist handles objects itself")
