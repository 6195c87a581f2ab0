"""The last thing a rank did: a page of memory behind a file, which any process of its machine can read.

A rank marks the beginning and the end of its calls, and what it does inside them at the grain of micro-batches and
sampled tokens. A mark is a write to mapped memory, a microsecond or two, and survives the process that made it: of a
stopped or dead rank it says what it was doing.
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
"""Number of the mark (odd while it is written), CLOCK_MONOTONIC seconds, calls under way, bytes of the text. Written by
assignment: `pack_into` fills the place with zeros first, which a reader may see."""
REQUESTS = struct.Struct("<QQ")
"""At the end of the page: flight records asked for, and written."""
MOST_BYTES = 400
READS = 1000
"""A mark is read at most so often, until none was written meanwhile; milliseconds where its writer was stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Holds what a rank has marked."""

    number: int
    """Grows with each mark."""
    at_s: float
    """time.monotonic() of the rank's machine."""
    num_calls: int
    """Calls under way in the rank."""
    text: str


class Page:
    """Maps the page of one rank, to write it or to read it."""

    def __init__(self, path: pathlib.Path, *, create: bool = False):
        """
        Args:
            create: begin a new page, in the place of that of an earlier process.

        Raises:
            OSError: there is no such page.
        """
        if create:
            # A new file and not the old one cut short: whoever still maps that would be killed for reading it.
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
        """Returns the newest mark; one that is torn, because its writer was stopped in the middle, as it is."""
        for _ in range(READS):
            number, at_s, num_calls, length = HEADER.unpack_from(self._map)
            text = bytes(self._map[HEADER.size : HEADER.size + min(length, MOST_BYTES)]).decode("utf-8", "replace")
            if number % 2 == 0 and HEADER.unpack_from(self._map)[0] == number:
                break
        return Mark(number=number, at_s=at_s, num_calls=num_calls, text=text)

    def requests(self) -> tuple[int, int]:
        """Returns how many flight records were asked for, and how many of them are written."""
        return REQUESTS.unpack_from(self._map, PAGE_BYTES - REQUESTS.size)

    def request(self) -> int:
        """Asks the rank for its flight record; returns the number of the request."""
        asked = self.requests()[0] + 1
        self._map[PAGE_BYTES - REQUESTS.size : PAGE_BYTES - NUMBER.size] = NUMBER.pack(asked)
        return asked

    def answer(self, number: int) -> None:
        """Says that the record of request `number` is written."""
        self._map[PAGE_BYTES - NUMBER.size :] = NUMBER.pack(number)

    def close(self) -> None:
        """Unmaps the page."""
        self._map.close()


class _Own:
    """Holds the page of this process, and how many calls it has under way."""

    page: Page | None = None
    num_calls = 0
    lock = threading.Lock()


def begin_marks(path: pathlib.Path) -> Page:
    """Makes the page of this process, which `mark` writes from now on."""
    _Own.page = Page(path, create=True)
    return _Own.page


def end_marks() -> None:
    """Has `mark` write nothing any more."""
    _Own.page = None


def mark(text: str) -> None:
    """Notes what this process does now; nothing in a process that has no page, such as the driver."""
    if _Own.page is not None:
        _Own.page.write(text, num_calls=_Own.num_calls)


def count_call(change: int) -> None:
    """Counts a call that begins (1) or ends (-1) in this process."""
    with _Own.lock:
        _Own.num_calls += change
