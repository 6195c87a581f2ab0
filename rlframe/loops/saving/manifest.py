"""Manifests, which prove that a checkpoint is whole and which run it belongs to: `run.json` in the run's folder, and
`COMPLETE` in each checkpoint.

`COMPLETE` is the manifest: run, configuration, step, and every file with its length and checksum. It is written last
and sealed by a digest of itself. Files that it does not list do not belong to the checkpoint. Imports no torch.
"""

import os
import re
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlframe.megatron.checkpoint.checksums import CHECKSUMS, CHUNK_BYTES, read_entries, whole_files
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.files.sealed import read_sealed, write_sealed

RUN = "run.json"
COMPLETE = "COMPLETE"
NAME = re.compile(r"step-(\d{8,})")
"""Name of a checkpoint's folder. Copies and backups have other names."""
FORMAT = 2
"""Format of the manifest. Format 1 had an empty `COMPLETE`, and was written until November 2026."""
READ_BYTES = 2e9
"""Bytes of a checkpoint that are read before any process starts, small files first. The ranks read all of it, in
parallel, before they load it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The run to which a checkpoint belongs."""

    run: str
    """Random id that was drawn when the run's folder was created."""
    configuration: str
    """SHA-256 of the settings that must not change when a run is resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of a checkpoint."""

    format: int
    run: str
    configuration: str
    step: int
    score: float | None
    """Value of `checkpoint.best_metric`."""
    files: dict[str, list[int]]
    """[bytes, CRC-32] by path in the checkpoint."""
    metric: str | None = None
    """Name of the metric of `score`. None in checkpoints from before 2026-11-30."""


def named_checkpoints(folder: Path) -> list[Path]:
    """Returns the entries of `folder` with the name of a checkpoint. `folder` need not exist."""
    return [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]


def step_of(checkpoint: Path) -> int:
    """Returns the step in the name of a checkpoint."""
    named = NAME.fullmatch(checkpoint.name)
    assert named, checkpoint
    return int(named[1])


def claim_owner(output: Path, configuration: str) -> Owner:
    """Returns the identity of the run in the folder `output`. Creates it if there is none.

    Raises:
        ConfigError: the folder belongs to another configuration, or `run.json` is missing.
        OutputError: the file cannot be written.
    """
    if owner := find_owner(output, configuration):
        return owner
    owner = Owner(run=secrets.token_hex(8), configuration=configuration)
    write_sealed(output / RUN, asdict(owner))
    return owner


def find_owner(output: Path, configuration: str) -> Owner | None:
    """Returns the identity of the run in the folder `output`. None if there is no run.

    Raises:
        ConfigError: the folder belongs to another configuration, or `run.json` is missing.
    """
    file = output / RUN
    if file.exists():
        owner = read_owner(output)
        if owner.configuration != configuration:
            raise ConfigError([
                f"output: {file} was written for another configuration, although config.yaml agrees: "
                    "config.yaml was edited, or belongs to another version of rlframe; set output=ANOTHER"
            ])  # fmt: skip
        return owner
    if found := sorted(named_checkpoints(output / "checkpoints"), key=step_of):
        raise ConfigError([
            f"output: {file} is missing, which identifies the run of {found[-1]}; restore it, or use the "
                f"weights in a new run with checkpoint.start_from={found[-1] / 'training'} and output=ANOTHER"
        ])  # fmt: skip
    return None


def read_owner(output: Path) -> Owner:
    """Returns the identity of the run in the folder `output`.

    Raises:
        CheckpointError: `run.json` is missing, or has changed since it was written.
    """
    return Owner(**read_sealed(output / RUN))


def seal(checkpoint: Path, owner: Owner, *, step: int, score: float | None, metric: str | None = None) -> None:
    """Writes the manifest of all files in the folder `checkpoint`, and flushes it to the disk.

    Args:
        metric: name of the metric of the score.

    Raises:
        CheckpointError: a file's length differs from the number of bytes written to it.
        OutputError: the manifest cannot be written.
    """
    files: dict[str, list[int]] = {}
    for folder in sorted({file.parent for file in _files(checkpoint)}):
        # The ranks computed the checksums of their files from memory.
        known = whole_files(read_entries(folder)) if (folder / CHECKSUMS).exists() else {}
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            length, crc32 = known.get(file.name) or (file.stat().st_size, _crc32(file))
            if file.stat().st_size != length:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size} bytes, but {length} were written: the disk or the "
                    "network to it loses data; use another one"
                )
            files[file.relative_to(checkpoint).as_posix()] = [length, crc32]
    manifest = Manifest(format=FORMAT, **asdict(owner), step=step, score=score, metric=metric, files=files)
    write_sealed(checkpoint / COMPLETE, asdict(manifest))


def read_manifest(checkpoint: Path) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, has changed since it was written, or has another format.
    """
    path = checkpoint / COMPLETE
    if path.is_file() and not path.stat().st_size:
        raise CheckpointError(
            f"{path} is empty, as in format 1 of November 2026 and before, which this version of rlframe "
            "does not resume: finish the run with the version that wrote it, or use the weights in a "
            f"new run with checkpoint.start_from={checkpoint / 'training'}; or it was emptied"
        )
    content = read_sealed(path)
    names = {field.name for field in fields(Manifest)}
    if set(content) | {"metric"} != names or content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')}, this version of rlframe reads format {FORMAT}"
        )
    return Manifest(**content)


def require_whole(checkpoint: Path, manifest: Manifest, *, read: bool) -> None:
    """Compares a checkpoint with its manifest: every name, every length, and the bytes of as many files as READ_BYTES
    allow.

    Args:
        read: whether to read files; False reads only the small file of the run's state.

    Raises:
        CheckpointError: something differs; the message names the file.
    """
    expected = manifest.files
    parents = {parent.as_posix() for name in expected for parent in Path(name).parents}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if name != COMPLETE and name not in (parents if path.is_dir() else expected):
            raise CheckpointError(f"{path} does not belong to the checkpoint; move it away")
    allowance = READ_BYTES if read else 0
    # Files at the top, such as the run's state, come first.
    for name, (length, crc32) in sorted(expected.items(), key=lambda item: ("/" in item[0], item[1][0])):
        file = checkpoint / name
        _require_length(file, length)
        allowance -= length
        if "/" not in name or allowance >= 0:
            found = _crc32(file)
            if found != crc32:
                raise CheckpointError(f"{file} is damaged: its CRC-32 is {found:08x}, expected {crc32:08x}")


def _require_length(file: Path, length: int) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    if size != length:
        what = "is truncated" if size < length else "has grown"
        raise CheckpointError(f"{file} {what}: it has {size} bytes, expected {length}")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _crc32(file: Path) -> int:
    crc32 = 0
    try:
        with file.open("rb") as handle:
            # Pages in the page cache were not read from the disk.
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := handle.read(CHUNK_BYTES):
                crc32 = zlib.crc32(chunk, crc32)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    return crc32
