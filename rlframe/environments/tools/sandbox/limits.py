"""The limits of a program, and how it ended."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one program with everything that it starts."""

    timeout_s: float
    cpu_s: int
    """Processor seconds of each of its processes."""
    memory_bytes: int
    """Address space of each of its processes, and memory of all of them and of their files."""
    processes: int
    """Processes and threads at the same time."""
    file_bytes: int
    """Size of all of its files together."""
    files: int
    """Number of its files and folders."""
    output_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The end of a program."""

    output: str
    exit_code: int
    """0 to 255. A program that signal `n` ended has 128 + n."""
    stopped: str = ""
    """The limit that ended it, as a sentence without its subject. Empty if none did."""


class DidNotStart(Exception):
    """Raised if the sandbox itself fails, before the program begins."""
