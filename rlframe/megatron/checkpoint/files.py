"""Files of a distributed checkpoint: each rank writes its own with a checksum of every entry, and reads it back.

The format is torch's (`torch.distributed.checkpoint`, one file of `torch.save` entries per rank and a `.metadata` that
finds them), as Megatron's `torch_dist` backend writes it. Nothing here communicates, so that it can run in a thread
during training; the caller exchanges data between ranks. (`dcp.async_save` would need a process group of its own, whose
collectives hang if a rank dies.)

`image` has torch make the content of a file without its values, `writer` writes it with them, `checksums` stores the
checksums, and `reading` reads the files.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from rlframe.megatron.checkpoint.checksums import CHECKSUMS, THIS_FILE, Entry, write_entries
from rlframe.megatron.checkpoint.image import Image, Part, image
from rlframe.megatron.checkpoint.staging import Staged
from rlframe.megatron.checkpoint.writer import write_file
from rlframe.utils.files.whole import writing


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The result of one rank's writing. It can be pickled."""

    results: list[WriteResult]
    """Position of each piece."""
    entries: list[Entry]
    write_s: float
    """Seconds until the file was on the disk. Most of what is read back has been by then."""
    verify_s: float
    """Further seconds until the rest was read back. 0 if that was not requested."""


def write(staged: Staged, *, read_back: float = 1.0) -> Written:
    """Writes this rank's file, and compares what the disk then has with what was written.

    Args:
        read_back: fraction of the file to read back; see `write_file`.

    Raises:
        OutputError: the file cannot be written; the message has the system's error.
        CheckpointError: the file reads back differently.
    """
    if not staged.items:
        return Written(results=[], entries=[], write_s=0.0, verify_s=0.0)
    whole = image(staged.items, folder=staged.folder, rank=staged.rank)
    ends = [end for _, _, end in _stretches(whole)]
    with writing(path := staged.folder / whole.name):
        report = write_file(path, _fetched(whole, staged), ends=ends, read_back=read_back)
    return Written(
        results=whole.results,
        entries=list(_entries(whole, report.crc32_at)),
        write_s=report.write_s,
        verify_s=report.verify_s,
    )


def _fetched(whole: Image, staged: Staged) -> Iterator[Part]:
    """Yields the parts of a file, with the values of one tensor after the other."""
    for part in whole.parts:
        fetched = staged.fetch(part.content) if isinstance(part.content, Tensor) else part.content
        yield Part(part.offset, part.length, fetched)


def _stretches(whole: Image) -> Iterator[tuple[WriteResult, int, int]]:
    """Yields each item's position in the file, its first byte and its end; they are consecutive."""
    offset = 0
    for result in whole.results:
        yield result, offset, offset + result.size_in_bytes
        offset += result.size_in_bytes
    assert offset == whole.length


def _entries(whole: Image, crc32_at: Mapping[int, int]) -> Iterator[Entry]:
    for result, offset, end in _stretches(whole):
        where = f" at {list(result.index.offset)}" if result.index.offset else ""
        yield Entry(whole.name, f"{result.index.fqn}{where}", offset, end - offset, crc32_at[end])


def seal(staged: Staged, written: Iterable[Written]) -> None:
    """Writes `.metadata`, which locates every piece, and the checksums of all files. Runs on rank 0, after all ranks
    have written.

    Raises:
        OutputError: one of the two cannot be written.
    """
    assert staged.metadata is not None, "only rank 0 knows all pieces"
    written = list(written)
    with writing(staged.folder):
        FileSystemWriter(staged.folder).finish(staged.metadata, [each.results for each in written])
        entries = [entry for each in written for entry in each.entries]
        mine = {entry.file for entry in entries} | {CHECKSUMS}
        # Megatron's own small files: their checksums are of the files, they guard them from now on.
        for path in sorted(staged.folder.iterdir()):
            if path.name not in mine:
                content = path.read_bytes()
                entries.append(Entry(path.name, THIS_FILE, 0, len(content), zlib.crc32(content)))
    write_entries(staged.folder, entries)
