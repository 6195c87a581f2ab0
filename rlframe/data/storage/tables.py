"""Records and rendered prompts in memory-mapped Arrow files, so that they do not live as Python objects.

A record is stored as its JSON, and comes out as it was read: with the fields it has and no others, in their order, each
of the type that it has there. (As columns, which is how `datasets` reads JSON, a missing field becomes null, 1 beside
1.5 becomes 1.0, and integers from 2**63 on lose digits; docs/data.md has the list.) `datasets` writes and maps the
files. It is imported here only, when there is something to store: that takes most of a second.

A file of records is kept in `data.cache_folder` for later runs, under the SHA-256 of everything that decides it: the
path, the files' contents, `data.max_record_mb` and the code. Its name holds its own SHA-256 too, which is compared
before it is used. It counts in `data.cache_gb`. Without such a folder the file is nameless, gone with the process.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from rlframe.data.config import DataConfig
from rlframe.data.records import Record, hub_record, hub_rows, is_hub, iterate, read
from rlframe.data.storage.folder import cache_folder, digest_of, evict, files_of
from rlframe.data.storage.sequences import Lazy
from rlframe.utils.files.whole import PARTIAL, put

logger = logging.getLogger(__name__)
FORMAT = 1
SMALL_BYTES = 32_000_000
"""Total size of files in bytes below which they are held as objects, because storing them would cost more than it
saves."""
BATCH_BYTES = 8_000_000
BATCH_ROWS = 1000
"""Greatest numbers of rows and bytes that are written at a time."""
ENDING = ".records"
CODE = [Path(__file__), Path(__file__).parents[1] / "records.py"]
Row = dict[str, Any]
PLAIN = (str, int, float, bool, type(None))


class Records(Sequence[Record]):
    """The records of one path in a mapped file. Each is made when it is requested."""

    def __init__(self, table: Any, others: dict[int, dict[str, Any]]):
        """Stores the mapped file.

        Args:
            table: the `datasets.Dataset`.
            others: fields of records that JSON cannot represent, by position.
        """
        self._table, self._others = table, others

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self._record(place, self._table[place])

    def __iter__(self) -> Iterator[Record]:
        rows = (
            dict(zip(columns, row, strict=True))
            for columns in self._table.iter(batch_size=BATCH_ROWS)
            for row in zip(*columns.values(), strict=True)
        )
        return (self._record(place, row) for place, row in enumerate(rows))

    def _record(self, place: int, row: Row) -> Record:
        fields = self._others[place] if place in self._others else json.loads(row["json"])
        return Record(fields=fields, source=row["source"], where=row["where"])


def records(path: str, config: DataConfig) -> Sequence[Record]:
    """Returns the records of a file, a folder or a dataset of the hub, as a list if they are few.

    Raises:
        DataError: as `records.read` does.
    """
    if is_hub(path) and (rows := hub_rows(path)):
        return Lazy(lambda place: hub_record(path, place, rows[place]), range(len(rows)))
    files = _large_files(path)
    if not files:
        return read(path, max_bytes=config.max_record_bytes)
    folder = cache_folder(config)
    key = _key(path, files, config)
    if folder and (known := _known(folder, key)):
        logger.info("records of %s from %s", path, known)
        return Records(opened(known), {})
    return _stored(path, config, folder, key)


def spilled(rows: Iterable[Row], types: dict[str, str]) -> Any:
    """Returns a `datasets.Dataset` of `rows` in a nameless file.

    Args:
        types: Arrow's type of each column.
    """
    with tempfile.NamedTemporaryFile(suffix=PARTIAL) as aside:
        write_rows(Path(aside.name), rows, types)
        return opened(Path(aside.name))


def opened(file: Path) -> Any:
    """Returns the mapped `datasets.Dataset` of a file of rows. The file may be removed afterwards."""
    import datasets  # noqa: PLC0415 - see the head of this file

    return datasets.Dataset.from_file(str(file))


def write_rows(file: Path, rows: Iterable[Row], types: dict[str, str]) -> None:
    """Writes rows to an Arrow file."""
    import datasets  # noqa: PLC0415 - see the head of this file
    from datasets.arrow_writer import ArrowWriter  # noqa: PLC0415

    features = datasets.Features({name: _feature(datasets, kind) for name, kind in types.items()})
    with ArrowWriter(path=str(file), features=features) as writer:
        for batch in _batches(rows):
            writer.write_batch({name: [row[name] for row in batch] for name in types}, writer_batch_size=len(batch))
        writer.finalize()


def _feature(datasets: Any, kind: str) -> Any:
    inner = kind.removeprefix("list of ")
    return datasets.List(datasets.Value(inner)) if inner != kind else datasets.Value(kind)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) for value in row.values())
        if size >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _large_files(path: str) -> list[Path]:
    """Returns the files to be stored. None if they are small, or if reading will report what is wrong with them."""
    try:
        place = Path(path).expanduser()
        files = [file for file in files_of(place) if file.is_file()] if place.exists() else []
        return files if sum(file.stat().st_size for file in files) > SMALL_BYTES else []
    except (OSError, ValueError, RuntimeError):
        return []


def _key(path: str, files: Sequence[Path], config: DataConfig) -> str:
    """Returns the SHA-256 of everything that decides the records of a path."""
    digest = hashlib.sha256(json.dumps([FORMAT, path, config.max_record_bytes]).encode())
    for file in [*CODE, *files]:
        digest.update(file.name.encode() + b"\0" + digest_of(file))
    return digest.hexdigest()


def _known(folder: Path, key: str) -> Path | None:
    """Returns the whole file of records with this key; removes a damaged one."""
    with suppress(OSError):
        for file in sorted(folder.glob(f"{key}-*{ENDING}")):
            if digest_of(file).hex() == file.name.removeprefix(f"{key}-").removesuffix(ENDING):
                # When it was last read, which few file systems keep by themselves. Another user's may be read only.
                with suppress(PermissionError):
                    os.utime(file)
                return file
            logger.warning("%s: the stored records are damaged; they are stored anew", file)
            file.unlink(missing_ok=True)
    return None


def _stored(path: str, config: DataConfig, folder: Path | None, key: str) -> Sequence[Record]:
    """Reads the records, and stores them if they may be kept."""
    found = iterate(path, max_bytes=config.max_record_bytes)
    # What cannot be read is told before a file is made.
    found = chain([next(found)], found)
    others: dict[int, dict[str, Any]] = {}
    types = {"json": "large_string", "source": "string", "where": "string"}
    rows = (_row(place, record, others) for place, record in enumerate(found))
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{key}.", suffix=PARTIAL, delete=False) as aside:
            partial = Path(aside.name)
        try:
            write_rows(partial, rows, types)
            table = opened(partial)
            if folder and not others:
                _keep(partial, folder, key, most_bytes=config.cache_gb * 1e9)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: records could not be stored (%s), and are held in memory", path, error)
        return read(path, max_bytes=config.max_record_bytes)
    return Records(table, others)


def _keep(partial: Path, folder: Path, key: str, *, most_bytes: float) -> None:
    """Gives a file of records its final name, if it fits in the folder."""
    size = partial.stat().st_size
    if size > most_bytes:
        logger.warning("records are not kept for later runs: their %d bytes are more than data.cache_gb", size)
        return
    evict(folder, most_bytes - size, besides=partial)
    put(partial, folder / f"{key}-{digest_of(partial).hex()}{ENDING}")


def _row(place: int, record: Record, others: dict[int, dict[str, Any]]) -> Row:
    # What was read from JSON can be said in JSON.
    if not record.source.endswith(".parquet") or is_plain(record.fields):
        text = json.dumps(record.fields, separators=(",", ":"), ensure_ascii=False)
    else:
        others[place], text = record.fields, ""
    return {"json": text, "source": record.source, "where": record.where}


def is_plain(value: Any) -> bool:
    """Returns whether JSON says the value as it is: no bytes, dates, tuples or names that are no text, as Parquet may
    have."""
    level = [value]
    while level:
        deeper: list[Any] = []
        for one in level:
            if type(one) is dict:
                if any(type(name) is not str for name in one):
                    return False
                deeper += one.values()
            elif type(one) is list:
                deeper += one
            elif type(one) not in PLAIN:
                return False
        level = deeper
    return True
