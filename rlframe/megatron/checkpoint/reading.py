"""Megatron's reading of distributed checkpoints with every pickle taken out of it.

Megatron 0.16.1 reads `.metadata` with pickle, objects beside tensors with `torch.load(weights_only=False)`, and
`common.pt`, of which nothing is needed here. Tensors it reads with `weights_only=True`.
"""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from rlframe.megatron.checkpoint.metadata import read_metadata, require_plain
from rlframe.utils.errors import CheckpointError

BACKEND = "torch_dist"


def load(state: dict[str, Any], folder: Path, *, whole: bool) -> dict[str, Any]:
    """Returns `state` with the values that the checkpoint in `folder` has; see `dist_checkpointing.load`.

    Args:
        whole: all ranks together ask for whole tensors, which is checked.
    """
    require_backend(folder)
    with _Seam():
        return dist_checkpointing.load(
            state,
            str(folder),
            sharded_strategy=torch_strategies.TorchDistLoadShardedStrategy(),
            common_strategy=_NothingInCommon(),
            validate_access_integrity=whole,
        )


def stored_names(folder: Path) -> set[str]:
    """Returns the names of everything in the checkpoint in `folder`: tensors, and objects beside them."""
    require_backend(folder)
    with _Seam():
        strategy = torch_strategies.TorchDistLoadShardedStrategy()
        return set(load_sharded_metadata(str(folder), strategy, _NothingInCommon()))


def require_backend(folder: Path) -> None:
    """Raises CheckpointError unless `metadata.json` in `folder` names the one format that is read here."""
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not what Megatron writes beside a distributed checkpoint: {error}") from error
    if backend != BACKEND:
        raise CheckpointError(f"{path} must name sharded_backend {BACKEND!r}, got {backend!r:.80}")


class _Seam:
    """Puts this file's reader and planner where Megatron's strategy, which takes neither as an argument, makes its own;
    inside a `with` block."""

    def __enter__(self) -> None:
        self._theirs = torch_strategies._get_filesystem_reader, torch_strategies.MCoreLoadPlanner
        torch_strategies._get_filesystem_reader = lambda folder, cache_metadata=False: _Reader(folder)
        torch_strategies.MCoreLoadPlanner = _Planner

    def __exit__(self, *_: object) -> None:
        torch_strategies._get_filesystem_reader, torch_strategies.MCoreLoadPlanner = self._theirs


class _Reader(CachedMetadataFileSystemReader):
    """Reads `.metadata` as data."""

    def read_metadata(self) -> Metadata:
        """See `metadata.read_metadata`."""
        if self._cached_metadata is None:
            self._cached_metadata = read_metadata(Path(self.path))
            self._cached_metadata.storage_meta.load_id = self.load_id
        return self._cached_metadata


class _Planner(torch_strategies.MCoreLoadPlanner):
    """Reads objects beside tensors as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keeps what an object of the checkpoint holds, if that is tensors and plain values."""
        name = read_item.dest_index.fqn
        try:
            held = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise CheckpointError(f"{name} is not plain values: {str(error).splitlines()[0]:.300}") from error
        for each in held if isinstance(held, list) else [held]:
            # Transformer Engine keeps its state as the bytes of a pickle, none where there is no FP8.
            if isinstance(each, torch.Tensor) and each.dtype is torch.uint8 and each.numel():
                require_plain(each.cpu().numpy().tobytes(), name=name)
        # Where torch's own planner puts it.
        set_element(self.original_state_dict, self.mappings[name], held)


class _NothingInCommon(LoadCommonStrategy):
    """Leaves `common.pt` unread: the run's state has all that is not a tensor."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Is never asked: the format keeps objects beside tensors."""
        raise AssertionError("torch_dist handles objects itself")

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Is never asked: the format keeps objects beside tensors."""
        raise AssertionError("torch_dist handles objects itself")

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Accepts every one, as nothing is read."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Accepts every one, as nothing is read."""
