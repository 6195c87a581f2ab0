"""Reads Megatron's distributed checkpoints without unpickling anything.

Megatron's own `dist_checkpointing.load` reads `.metadata` with pickle (0.16 and 0.19), objects beside tensors with
`weights_only=False` (0.16), and `common.pt`, which is not needed here. So this file reads through
`torch.distributed.checkpoint.load`, with a storage reader that treats `.metadata` as data and a planner that accepts
only plain values as objects. torch reads tensors with `weights_only=True`. Megatron prepares what is read and checks
that all ranks together request whole tensors.
"""

import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlframe.megatron.checkpoint.metadata import read_metadata
from rlframe.megatron.checkpoint.pieces import LoadPieces, Piece
from rlframe.utils.errors import CheckpointError

BACKEND = "torch_dist"
EMBEDDING = "embedding.word_embeddings.weight"


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


def load(
    state: dict[str, Any], reader: Reader, *, whole: bool, exhausted: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Returns `state` with the checkpoint's values, each read into its own tensor. All ranks must call it.

    Args:
        whole: whether all ranks together request whole tensors, which is checked.
        exhausted: beginnings of names of which the ranks together request all. None does not check it; it needs
            `whole`.

    Raises:
        CheckpointError: some that `exhausted` means are left.
    """
    wanted, not_stored, factories = load_preprocess(state)
    pieces, _ = extract_sharded_base(wanted)
    if whole:
        of_ranks = determine_global_metadata(pieces)[1]
        validate_sharding_integrity(of_ranks)
        if exhausted is not None:
            require_all({piece.key for rank in of_ranks for piece in rank}, reader, exhausted)
    # The planner holds what is read into; torch needs nothing beside it.
    planner = LoadPieces(nested_values(pieces))
    dcp.load({}, storage_reader=reader, planner=planner)

    def value_of(piece: Piece) -> Any:
        return piece.data if isinstance(piece, ShardedTensor) else planner.loaded[piece.unique_key]

    loaded = merge(not_stored, dict_list_map_outplace(value_of, pieces))
    return apply_factory_merges(loaded, factories)


def require_all(requested: set[str], reader: Reader, beginnings: tuple[str, ...]) -> None:
    """Raises CheckpointError if the checkpoint has weights of these beginnings that nobody requests: of another model,
    such as one with more layers or with biases."""
    stored = {name for name in reader.names if name.startswith(beginnings) and "_extra_state" not in name}
    if left := sorted(stored - requested):
        raise CheckpointError(
            f"{reader.path} does not hold this model: it has {len(left)} weights more than the model, such as {left[0]}"
        )


def require_vocabulary(reader: Reader, size: int) -> None:
    """Raises CheckpointError if the checkpoint's embedding has fewer rows than tokens. Megatron lets the number differ,
    because padding does, and would leave the rest zero."""
    embedding = reader.metadata.state_dict_metadata.get(EMBEDDING)
    if isinstance(embedding, TensorStorageMetadata) and embedding.size[0] < size:
        raise CheckpointError(
            f"{reader.path} does not hold this model: {EMBEDDING} has {embedding.size[0]} rows for {size} tokens"
        )


def require_backend(folder: Path) -> None:
    """Raises CheckpointError unless `metadata.json` in `folder` names the one supported format."""
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not what Megatron writes beside a distributed checkpoint: {error}") from error
    if backend != BACKEND:
        raise CheckpointError(f"{path} must name sharded_backend {BACKEND!r}, got {backend!r:.80}")
