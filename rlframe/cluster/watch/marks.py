"""The last action of a rank: a page of memory behind a file, which any process of its machine can read.

A rank marks the beginning and the end of its calls, and inside them every micro-batch or sampled token. A mark is a
write to mapped memory, which takes a microsecond or two, and survives its process: it shows the last action of a
stopped or dead rank.
"""

import mmap
import pathlib
import struct
import threading
import time
from dataclasses import dataclass

PAGE_BYTES = 4096
NUMBER = struct.Struct("<Q")
HEADER = struct.Struct("<QdQQ")
"""Layout of the header: number of the mark (odd while it is written), CLOCK_MONOTONIC seconds, number of calls under
way, bytes of the text. It is written by assignment, because `pack_into` fills the target with zeros first, which a
reader may see."""
REQUESTS = struct.Struct("<QQ")
"""Layout of the end of the page: numbers of flight records requested and written."""
MOST_BYTES = 400
READS = 1000
"""Greatest number of reads of a mark until none was written meanwhile. It takes milliseconds if the writer is
stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A mark of a rank."""

    number: int
    """Number of the mark, which grows with each."""
    at_s: float
    """Value of time.monotonic() on the rank's machine."""
    num_calls: int
    """Number of calls under way in the rank."""
    text: str


class Page:
    """The page of one rank, mapped for writing or reading."""

    def __init__(self, path: pathlib.Path, *, create: bool = False):
        """
        Args:
            create: begin a new page, in the place of that of an earlier process.

        Raises:
            OSError: there is no such page.
        """
        if create:
            # A new file instead of a truncated one: a process that still maps the old one would be killed for reading
            # it.
            path.unlink(missing_ok=True)
            path.write_bytes(bytes(PAGE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._lock = threading.Lock()
        self._number = 0

    def write(self, text: str, *, num_calls: int) -> None:
        """Replaces the mark."""
        content = text.encode("utf-8", "replace")[:MOST_BYTES]
        with self._lock:
            self._number += 2
            header = HEADER.pack(self._number - 1, time.monotonic(), num_calls, len(content))
            self._map[: NUMBER.size] = header[: NUMBER.size]
            self._map[NUMBER.size : HEADER.size + len(content)] = header[NUMBER.size :] + content
            self._map[: NUMBER.size] = NUMBER.pack(self._number)

    def read(self) -> Mark:
        """Returns the newest mark. A torn one, whose writer was stopped in the middle, is returned as it is."""
        for _ in range(READS):
            number, at_s, num_calls, length = HEADER.unpack_from(self._map)
            text = bytes(self._map[HEADER.size : HEADER.size + min(length, MOST_BYTES)]).decode("utf-8", "replace")
            if number % 2 == 0 and HEADER.unpack_from(self._map)[0] == number:
                break
        return Mark(number=number, at_s=at_s, num_calls=num_calls, text=text)

    def requests(self) -> tuple[int, int]:
        """Returns the numbers of flight records that were requested and written."""
        return REQUESTS.unpack_from(self._map, PAGE_BYTES - REQUESTS.size)

    def request(self) -> int:
        """Requests the rank's flight record and returns the number of the request."""
        asked = self.requests()[0] + 1
        self._map[PAGE_BYTES - REQUESTS.size : PAGE_BYTES - NUMBER.size] = NUMBER.pack(asked)
        return asked

    def answer(self, number: int) -> None:
        """Records that the flight record of request `number` is written."""
        self._map[PAGE_BYTES - NUMBER.size :] = NUMBER.pack(number)

    def close(self) -> None:
        """Unmaps the page."""
        self._map.close()


class _Own:
    """The page of this process and the number of calls under way."""

    page: Page | None = None
    num_calls = 0
    lock = threading.Lock()


def begin_marks(path: pathlib.Path) -> Page:
    """Creates the page of this process, to which `mark` writes from now on."""
    _Own.page = Page(path, create=True)
    return _Own.page


def end_marks() -> None:
    """Stops `mark` from writing."""
    _Own.page = None


def mark(text: str) -> None:
    """Marks the present action of this process. Does nothing in a process without a page, such as the driver."""
    if _Own.page is not None:
        _Own.page.write(text, num_calls=_Own.num_calls)


def count_call(change: int) -> None:
    """Counts a call that begins (1) or ends (-1) in this process."""
    with _Own.lock:
        _Own.num_calls += change
