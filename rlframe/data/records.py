"""Records as the file has them: JSONL, JSON, Parquet, text, or a Hugging Face dataset by name."""

import codecs
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)

KEYS = "data.path, data.evaluation_path or evaluation.sets.NAME.path"
"""Settings that name paths, for messages."""
EXTENSIONS = (".jsonl", ".json", ".parquet", ".txt")
PARQUET_ROWS = 1024
"""Number of rows that are read at a time."""
MEGABYTE = 1_000_000
MOST_LEVELS = 200
"""Greatest nesting of lists and objects. Python's own functions for JSON can write about 900 levels."""
SURROGATE = re.compile("[\ud800-\udfff]")
MOST_NAMES = 20
MOST_NUMBER = 3e38
"""Greatest absolute value of a number: float32 ends at 3.4e38."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One raw record and its position."""

    fields: dict[str, Any]
    """Fields as read."""
    source: str
    """Name of the file or dataset, without its folders."""
    where: str
    """Position for messages: `path:line` of a JSONL file, `path[index]` of other sources (index from 0)."""
    namespace: str = ""
    """Prefix that distinguishes the ids of several datasets. Empty if there is only one."""
    task: str = ""
    """Text that tells the record apart from others with the same prompt, so that one of them can be held out and
    another one trained on: the task that an environment knows. Empty if the prompt says everything."""
    shares_id: bool = False
    """Whether a record before it, which says something else, has the same `id`."""

    @property
    def has_columns(self) -> bool:
        """Returns whether it comes from a file with columns (Parquet, hub), and so has the fields of all records."""
        return self.source.endswith(".parquet") or "/" in self.source

    def first(self, keys: Sequence[str]) -> str | None:
        """Returns the first of `keys` that the record has a value for, or, where all are null, has at all. Files with
        columns give every record the fields of all."""
        present = [key for key in keys if key in self.fields]
        return next((key for key in present if self.fields[key] is not None), present[0] if present else None)

    def has(self, key: str) -> bool:
        """Returns whether the record has a value for `key`."""
        return self.fields.get(key) is not None

    @property
    def names(self) -> str:
        """The names of its fields, for a message."""
        listed = [name if len(name) <= MOST_NAMES * 2 else f"{name[: MOST_NAMES * 2]}..." for name in self.fields]
        more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
        return ", ".join(listed[:MOST_NAMES]) + more or "none"

    @property
    def id(self) -> str:
        """The record's own `id`, or the first 16 hex digits of sha256 of its canonical JSON; both if it `shares_id`.
        With the prefix `namespace/` if there is one."""
        own = self.fields.get("id")
        named = isinstance(own, str | int) and own != ""
        if not named or self.shares_id:
            canonical = json.dumps(self.fields, sort_keys=True, separators=(",", ":"), default=str)
            digest = hashlib.sha256(canonical.encode()).hexdigest()[:16]
            own = f"{own}-{digest}" if named else digest
        return f"{self.namespace}/{own}" if self.namespace else str(own)


def read(path: str, *, max_bytes: float) -> list[Record]:
    """Returns all records of a file, a folder (its files in the order of their names) or a Hugging Face dataset.

    Args:
        max_bytes: greatest size of a record.

    Raises:
        DataError: the source is missing or empty, has an unknown format, or has a malformed record.
    """
    return list(iterate(path, max_bytes=max_bytes))


def iterate(path: str, *, max_bytes: float, streaming: bool = False) -> Iterator[Record]:
    """Yields the records that `read` returns, one by one.

    Args:
        streaming: whether to hold only the requested records, a text file or a part of a Parquet file; refuses .json.
    """
    place, files = _place(path)
    if files is not None:
        read = set(files)
        if left := sorted(file.name for file in place.iterdir() if file not in read and file.name[0] != "."):
            more = f" and {len(left) - MOST_NAMES} more" if len(left) > MOST_NAMES else ""
            logger.warning(
                "%s: %s%s are not read, only the folder's own %s files",
                path, ", ".join(left[:MOST_NAMES]), more, ", ".join(EXTENSIONS),
            )  # fmt: skip
        for file in files:
            yield from iterate(str(file), max_bytes=max_bytes, streaming=streaming)
        return
    if streaming and place.suffix == ".json":
        raise DataError(
            f"{path}: expected .jsonl, .parquet or .txt with data.streaming=true, as a .json file can only be read "
            "whole; write one object per line to a .jsonl file"
        )
    if place.is_file():
        records = _read_file(place, max_bytes)
    elif is_hub(path):
        records = _read_hub(path, streaming=streaming)
    else:
        found = "neither" if place.exists() else "nothing there"
        raise DataError(
            f"{path}: expected a file, a folder or a Hugging Face dataset owner/name ({KEYS}), found {found}"
        )
    empty = True
    for record in records:
        empty = False
        yield record
    if empty:
        raise DataError(f"{path}: expected records, found an empty file")


def is_data(file: Path) -> bool:
    """Returns whether a folder's file of this name is read: one of EXTENSIONS, and not hidden."""
    return file.suffix in EXTENSIONS and file.name[0] != "."


def _place(path: str) -> tuple[Path, list[Path] | None]:
    """Returns the path, or the files of a folder in the order of their names."""
    try:
        place = Path(path).expanduser()
        if not place.is_dir():
            return place, None
        files = sorted(file for file in place.iterdir() if is_data(file))
    except (OSError, ValueError, RuntimeError) as error:
        # A folder that may not be read, a name that is none, or the home of nobody.
        raise DataError(f"{path!r:.200} ({KEYS}) cannot be read: {error!s:.200}") from error
    if not files:
        raise DataError(f"{path}: expected a folder with {', '.join(EXTENSIONS)} files, found none")
    if strange := [file for file in files if not file.is_file()]:
        raise DataError(f"{strange[0]}: expected a file, found a folder, a pipe or a link to nowhere")
    return place, files


def _read_file(file: Path, max_bytes: float) -> Iterator[Record]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".txt": _read_text}
    if file.suffix not in readers:
        raise DataError(
            f"{file}: expected a file ending in {', '.join(EXTENSIONS)}, found {file.suffix or 'no ending'!r}"
        )
    try:
        for where, fields in readers[file.suffix](file, max_bytes):
            check_values(fields, where)
            if not isinstance(fields, dict):
                raise DataError(f"{where}: expected a JSON object, found {type(fields).__name__} {_brief(fields)}")
            yield Record(fields=fields, source=file.name, where=where)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error!s:.200}") from error


def _read_jsonl(file: Path, max_bytes: float) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number in count(1):
            line = lines.readline(int(max_bytes) + 1)
            if not line:
                return
            where = f"{file}:{number}"
            if len(line) > max_bytes:
                raise _too_long(where, max_bytes)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield where, parse_json(line)
            except ValueError as error:
                raise DataError(
                    f"{where}: expected one JSON object per line, found {_brief(line)} ({error!s:.200})"
                ) from error


def _read_json(file: Path, max_bytes: float) -> Iterator[tuple[str, Any]]:
    content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        return
    try:
        values = parse_json(content)
    except ValueError as error:
        raise DataError(
            f"{file}: expected one JSON list of objects, found something else ({error!s:.200}); "
            "name it .jsonl if it has one object per line"
        ) from error
    if not isinstance(values, list):
        raise DataError(f"{file}: expected one JSON list of objects, found {type(values).__name__} {_brief(values)}")
    for index, fields in enumerate(values):
        where = f"{file}[{index}]"
        if len(content) > max_bytes and len(json.dumps(fields).encode()) > max_bytes:
            raise _too_long(where, max_bytes)
        yield where, fields


def _read_parquet(file: Path, max_bytes: float) -> Iterator[tuple[str, Any]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1] if len(names) != len(set(names)) else []:
                raise DataError(f"{file}: expected each column once, found {twice[0]!r:.60} twice")
            index = 0
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                if batch.nbytes > max_bytes:
                    for row in range(batch.num_rows):
                        if batch.slice(row, 1).nbytes > max_bytes:
                            raise _too_long(f"{file}[{index + row}]", max_bytes)
                for fields in batch.to_pylist():
                    yield f"{file}[{index}]", fields
                    index += 1
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
        raise DataError(f"{file}: expected a Parquet file, found something else ({error!s:.200})") from error


def _read_text(file: Path, max_bytes: float) -> Iterator[tuple[str, Any]]:
    if file.stat().st_size > max_bytes:
        raise _too_long(str(file), max_bytes)
    try:
        text = file.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
    except ValueError as error:
        raise DataError(f"{file}: expected text in UTF-8, found something else ({error})") from error
    if text.strip():
        yield f"{file}", {"text": text}


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        ValueError: the text is not JSON, has a key twice or an invalid number (NaN, 1e999), or is nested too deeply.
    """
    try:
        return json.loads(
            text.decode() if isinstance(text, bytes) else text,
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key {next(name for name in names if names.count(name) > 1)!r:.60} twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def check_values(value: Any, where: str) -> None:
    """Raises DataError for text that is not valid Unicode (half of a surrogate pair), and for more than MOST_LEVELS
    levels."""
    level, levels = [value], 0
    while level:
        levels += 1
        if levels > MOST_LEVELS:
            raise DataError(f"{where}: expected at most {MOST_LEVELS} levels of lists and objects, found more")
        deeper: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if not one.isascii() and (half := SURROGATE.search(one)):
                    raise DataError(
                        f"{where}: expected text, found {half[0]!r}, half of a surrogate pair, in {_brief(one)}"
                    )
            elif isinstance(one, dict):
                deeper += one.keys()
                deeper += one.values()
            elif isinstance(one, list | tuple):
                deeper += one
        level = deeper


def is_number(value: Any) -> bool:
    """Returns whether the value is a number that float32, in which losses are computed, can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_NUMBER


def _too_long(where: str, max_bytes: float) -> DataError:
    return DataError(
        f"{where}: expected a record of at most data.max_record_mb={max_bytes / MEGABYTE:g} MB, found a longer one; "
        "raise it, or cut the record"
    )


def is_hub(path: str) -> bool:
    """Returns whether a path is taken for the name of a dataset of the hub: nothing is there, and it has the form."""
    try:
        place = Path(path).expanduser()
        return not place.exists() and place.suffix not in EXTENSIONS and HUB_NAME.fullmatch(path) is not None
    except (OSError, ValueError, RuntimeError):
        return False


def hub_rows(path: str, *, streaming: bool = False) -> Any:
    """Returns the rows of a dataset of the hub, as `datasets` stores them: in mapped files, unless they are streamed.

    Raises:
        DataError: the dataset does not exist, or cannot be read.
    """
    import datasets  # noqa: PLC0415 - takes most of a second, and only this door needs it
    from datasets.exceptions import DatasetsError  # noqa: PLC0415

    name, subset, split = [*path.split(":"), "", ""][:3]
    try:
        return datasets.load_dataset(name, subset or None, split=split or "train", streaming=streaming)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"{path}: cannot be read as a Hugging Face dataset owner/name[:subset[:split]]: {error.__cause__ or error}"
        ) from error


def hub_record(path: str, index: int, row: Any) -> Record:
    """Returns a row as a record. Raises DataError as `check_values` does."""
    where = f"{path}[{index}]"
    check_values(row, where)
    return Record(fields=dict(row), source=path.partition(":")[0], where=where)


def _read_hub(path: str, *, streaming: bool) -> Iterator[Record]:
    for index, row in enumerate(hub_rows(path, streaming=streaming)):
        yield hub_record(path, index, row)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
