"""Tokenised items on disk, keyed by everything that decides them, so that a second run need not tokenise again.

A file is the sha256 of what follows it, then NumPy's npz of four arrays: the tokens and weights of all parts end to
end, the parts' lengths, and JSON with the rest. A file is read at once, so a reader that has found it has all of it.
See `folder` for where it lies.
"""

import hashlib
import io
import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic

import numpy as np

from rlframe.data import builtin
from rlframe.data.builtin import verifiers
from rlframe.data.config import DataConfig
from rlframe.data.items import AnyItem, Item
from rlframe.data.storage.folder import cache_folder, digest_of, evict, files_of
from rlframe.data.text.template import day_read
from rlframe.data.text.turns import Tokens
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.files.whole import PARTIAL, put

logger = logging.getLogger(__name__)
CHECKSUM_BYTES = 32
PACKAGES = ("transformers", "tokenizers", "jinja2", "reasoning-gym")
"""Packages that make tokens, texts of conversations, and built-in datasets."""


@dataclass(kw_only=True, slots=True)
class Made(Generic[AnyItem]):
    """The result of reading and tokenising a dataset."""

    train: list[list[AnyItem]]
    """Items by entry of `data.path`."""
    held_out: list[AnyItem]
    dropped: dict[str, int]
    """Numbers of dropped items by reason."""
    counted: dict[str, int]
    """Counts of what the chat template does, by metric."""
    notes: dict[str, Any]
    """Data that the kind of data remembers, as plain JSON values."""


def cache_file(
    config: DataConfig,
    *,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_tokens: int,
    max_positions: int | None = None,
) -> Path | None:
    """Returns the file of the items of these records, tokenizer, settings and code. None if caching is off, or if a
    dataset is not a file of this machine, so that its content is unknown."""
    paths = [entry.path for entry in config.entries()] + ([config.evaluation_path] if config.evaluation_path else [])
    places = {path: Path(path).expanduser() for path in paths if not builtin.has(path)}
    folder = cache_folder(config)
    known = all(place.exists() for place in places.values())
    if folder is None or not known or any(path.startswith(verifiers.PREFIX) for path in paths):
        return None
    settings = asdict(config) | {"shuffle": None, "cache_folder": None, "cache_gb": None, "num_processes": None}
    settings["chat_template_date"] = day_read(tokenizer, config)
    counted = any(entry.count is not None for entry in config.entries())
    # Of each dataset, in their order, which decides whose items are whose. Names of files are part of ids and metrics.
    datasets = [(path, _files(places[path]) if path in places else []) for path in paths]
    code = [digest_of(file).hex() for file in sorted(Path(__file__).parent.rglob("*.py"))]
    packages = {name: _version(name) for name in PACKAGES}
    # The seed decides which records a count keeps. Settings are in the order in which they are stated.
    decisive = [kind, settings, max_tokens, max_positions, seed if counted else None, packages, code, datasets]
    digest = hashlib.sha256(json.dumps(decisive, default=str).encode())
    digest.update(_digest_of_tokenizer(tokenizer))
    return folder / f"{digest.hexdigest()}.items"


def _files(place: Path) -> list[tuple[str, str]]:
    """Returns the name and the digest of each file of a dataset."""
    return [(file.name, digest_of(file).hex()) for file in files_of(place)]


def _version(package: str) -> str | None:
    """Returns the version of a package. None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read(file: Path, item: type[AnyItem]) -> Made[AnyItem] | None:
    """Returns the items that `write` stored. None if there are none or if the checksum is wrong."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    # When it was last read, which few file systems keep by themselves. Another user's file may be read only.
    with suppress(PermissionError):
        os.utime(file)
    checksum, payload = content[:CHECKSUM_BYTES], memoryview(content)[CHECKSUM_BYTES:]
    if hashlib.sha256(payload).digest() != checksum:
        logger.warning("%s: the cached items are damaged; they are made anew", file)
        return None
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        token_ids, weights, lengths, text = (arrays[name] for name in ("token_ids", "weights", "lengths", "text"))
    rest = json.loads(text.tobytes())
    ends = np.cumsum(lengths).tolist()
    parts = iter(
        Tokens(token_ids=token_ids[end - length : end], weights=weights[end - length : end])
        for end, length in zip(ends, lengths.tolist(), strict=True)
    )

    def items(rows: list[dict[str, Any]]) -> list[AnyItem]:
        return [_item(item, row, tuple(next(parts) for _ in range(row["parts"]))) for row in rows]

    return Made(
        train=[items(rows) for rows in rest["train"]],
        held_out=items(rest["held_out"]),
        dropped=rest["dropped"],
        counted=rest["counted"],
        notes=rest["notes"],
    )


def write(file: Path, made: Made[AnyItem], *, most_bytes: float) -> None:
    """Stores the items for `read`. Only warns if the folder cannot be written.

    Args:
        most_bytes: bound of the size of all files of the folder together; older ones are removed.
    """
    everything = [item for rows in (*made.train, made.held_out) for item in rows]
    parts = [part for item in everything for part in item.parts]
    rest = {
        "train": [[_row(item) for item in rows] for rows in made.train],
        "held_out": [_row(item) for item in made.held_out],
        "dropped": made.dropped,
        "counted": made.counted,
        "notes": made.notes,
    }
    buffer = io.BytesIO()
    np.savez(
        buffer,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
        lengths=np.array([len(part.token_ids) for part in parts], dtype=np.int64),
        text=np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8),
    )
    payload = buffer.getvalue()
    if len(payload) + CHECKSUM_BYTES > most_bytes:
        logger.warning(
            "%s: tokenised items are not cached: their %d bytes are more than data.cache_gb", file, len(payload)
        )
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        evict(file.parent, most_bytes - len(payload) - CHECKSUM_BYTES)
        with tempfile.NamedTemporaryFile(
            dir=file.parent, prefix=f"{file.stem}.", suffix=PARTIAL, delete=False
        ) as aside:
            aside.write(hashlib.sha256(payload).digest() + payload)
        put(Path(aside.name), file)
    except OSError as error:
        logger.warning("%s: tokenised items could not be cached (%s); data.cache_folder=null says not to", file, error)


def _row(item: Item) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item) if field.name != "parts"} | {
        "parts": len(item.parts)
    }


def _item(kind: type[AnyItem], row: dict[str, Any], parts: tuple[Tokens, ...]) -> AnyItem:
    # JSON has lists only; items hold tuples.
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    plain["parts"] = parts
    return kind(**plain)


def _digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Returns the digest of the files as which the tokenizer, with its chat template, would be saved."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(file.name.encode() + digest_of(file))
    return digest.digest()
