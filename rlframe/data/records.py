"""Records as the file has them: JSONL, JSON, Parquet, text, or a Hugging Face dataset by name."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlframe.utils.errors import DataError

EXTENSIONS = (".jsonl", ".json", ".parquet", ".txt")
PARQUET_ROWS = 1024
"""Read at a time."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One raw record and where it stands."""

    fields: dict[str, Any]
    """As read."""
    source: str
    """Name of the file or dataset, without its folders."""
    where: str
    """`path:line` of a JSONL file, `path[index]` of other sources (index from 0): for error messages."""
    namespace: str = ""
    """Tells apart the ids of several datasets; empty where there is one."""

    @property
    def id(self) -> str:
        """The record's own `id`, else the first 16 hex digits of sha256 of its canonical JSON; behind `namespace/`
        where there is one."""
        own = self.fields.get("id")
        if not isinstance(own, str | int) or own == "":
            canonical = json.dumps(self.fields, sort_keys=True, separators=(",", ":"), default=str)
            own = hashlib.sha256(canonical.encode()).hexdigest()[:16]
        return f"{self.namespace}/{own}" if self.namespace else str(own)


def read(path: str) -> list[Record]:
    """All records of a file, a folder (its files in the order of their names) or a Hugging Face dataset.

    Raises:
        DataError: nothing there, nothing in it, a format that is not known, or a malformed record.
    """
    return list(iterate(path))


def iterate(path: str, *, streaming: bool = False) -> Iterator[Record]:
    """The records that `read` gives, one by one.

    Args:
        streaming: hold no more than is asked for, but for a text file or a part of a Parquet file; refuses .json.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in EXTENSIONS)
        if not files:
            raise DataError(f"{path}: expected a folder with {', '.join(EXTENSIONS)} files, found none")
        for file in files:
            yield from iterate(str(file), streaming=streaming)
        return
    if streaming and place.suffix == ".json":
        raise DataError(
            f"{path}: expected .jsonl, .parquet or .txt with data.streaming=true, as a .json file can only be read "
            "whole; write one object per line to a .jsonl file"
        )
    if place.is_file():
        records = _read_file(place)
    elif place.suffix not in EXTENSIONS and HUB_NAME.fullmatch(path):
        records = _read_hub(path, streaming=streaming)
    else:
        raise DataError(f"{path}: expected a file, a folder or a Hugging Face dataset owner/name, found nothing there")
    empty = True
    for record in records:
        empty = False
        yield record
    if empty:
        raise DataError(f"{path}: expected records, found an empty file")


def _read_file(file: Path) -> Iterator[Record]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".txt": _read_text}
    if file.suffix not in readers:
        raise DataError(
            f"{file}: expected a file ending in {', '.join(EXTENSIONS)}, found {file.suffix or 'no ending'!r}"
        )
    for where, fields in readers[file.suffix](file):
        if not isinstance(fields, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(fields).__name__} {_brief(fields)}")
        yield Record(fields=fields, source=file.name, where=where)


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                yield where, json.loads(line.decode())
            except ValueError as error:
                raise DataError(
                    f"{where}: expected one JSON object per line, found {_brief(line)} ({error})"
                ) from error


def _read_json(file: Path) -> Iterator[tuple[str, Any]]:
    content = file.read_bytes()
    if not content.strip():
        return
    try:
        values = json.loads(content.decode())
    except ValueError as error:
        raise DataError(
            f"{file}: expected one JSON list of objects, found something else ({error}); "
            "name it .jsonl if it has one object per line"
        ) from error
    if not isinstance(values, list):
        raise DataError(f"{file}: expected one JSON list of objects, found {type(values).__name__} {_brief(values)}")
    for index, fields in enumerate(values):
        yield f"{file}[{index}]", fields


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            batches = table.iter_batches(batch_size=PARQUET_ROWS)
            for index, fields in enumerate(fields for batch in batches for fields in batch.to_pylist()):
                yield f"{file}[{index}]", fields
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: expected a Parquet file, found something else ({error})") from error


def _read_text(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = file.read_bytes().decode()
    except ValueError as error:
        raise DataError(f"{file}: expected text in UTF-8, found something else ({error})") from error
    if text.strip():
        yield f"{file}", {"text": text}


def _read_hub(path: str, *, streaming: bool) -> Iterator[Record]:
    try:
        import datasets  # noqa: PLC0415 - optional: only this door needs it
    except ImportError as error:
        raise DataError(
            f"{path}: no such file, and reading a Hugging Face dataset by name needs the package datasets: "
            "pip install 'rlframe[datasets]'"
        ) from error
    name, subset, split = [*path.split(":"), "", ""][:3]
    try:
        rows = datasets.load_dataset(name, subset or None, split=split or "train", streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{path}: cannot be read as a Hugging Face dataset owner/name[:subset[:split]]: {error}"
        ) from error
    for index, fields in enumerate(rows):
        yield Record(fields=dict(fields), source=name, where=f"{path}[{index}]")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
