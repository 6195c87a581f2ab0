"""Identity of the weights with which a run begins. No checkpoint holds them, but adapters and a reference need them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve

WEIGHTS = {".safetensors", ".gguf", ".distcp"}
"""Endings of files that hold weights: of models, and of Megatron's distributed checkpoints."""
PIECES, PIECE_BYTES = 32, 1 << 16
"""Pieces of a file of weights that are read, and their bytes. Training changes weights everywhere, and reading all of a
large model takes minutes."""


def identity(model: ModelConfig, start_from: str | None) -> str:
    """Returns 64 hex digits that other first weights would change: config.json, and the names, lengths and some pieces
    of the files of weights.

    Args:
        start_from: folder of a distributed checkpoint from which the run takes its weights. None: the model's own.
    """
    folder = resolve(model)
    files = [folder / "config.json"]
    if start_from is not None:
        files += _weights(Path(start_from).expanduser())
    elif not model.random_init:
        files += _weights(folder)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for piece in _pieces(file):
            digest.update(piece)
    return digest.hexdigest()


def _weights(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS)


def _pieces(file: Path) -> Iterator[bytes]:
    """Yields the beginning of a file, pieces at equal distances, and its end."""
    last = max(file.stat().st_size - PIECE_BYTES, 0)
    with file.open("rb") as handle:
        for place in sorted({last * piece // (PIECES - 1) for piece in range(PIECES)}):
            handle.seek(place)
            yield handle.read(PIECE_BYTES)
