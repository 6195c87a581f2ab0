"""Memory of this process."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROCESSES = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux states the limits of a container, from inside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Memory of a process."""

    resident_bytes: int
    """Host memory that is mapped and there, with what other processes map too."""
    resident_peak_bytes: int
    """The greatest so far."""
    own_bytes: int
    """Host memory that no other process has; of the processes that it has started too, where that was asked."""
    tensor_bytes: int = 0
    """Bytes of tensors on its GPU. 0 on a CPU. Those of its children are not known."""
    reserved_bytes: int | None = None
    """Bytes that torch's allocator holds on its GPU: tensors, and what it keeps for the next ones. None on a CPU."""
    reserved_peak_bytes: int | None = None
    """The greatest so far."""

    @property
    def current_bytes(self) -> int:
        """Returns what its device gave it: of a GPU what is reserved, of a CPU what is resident."""
        return self.resident_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """Returns the greatest `current_bytes` so far."""
        return self.resident_peak_bytes if self.reserved_peak_bytes is None else self.reserved_peak_bytes


def used(*, with_children: bool = False) -> MemoryUse:
    """Returns the memory of this process.

    Args:
        with_children: whether to add the own memory of the processes that it has started.
    """
    here = status("self")
    own = own_bytes(here)
    if with_children:
        for child in psutil.Process().children(recursive=True):
            with suppress(FileNotFoundError, ProcessLookupError):
                own += own_bytes(status(str(child.pid)))
    host = {"resident_bytes": here["VmRSS"], "resident_peak_bytes": here["VmHWM"], "own_bytes": own}
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return MemoryUse(**host)
    # In one question: each number by itself asks for all of them, and an engine waits for this in every sync.
    sizes = torch.cuda.memory_stats_as_nested_dict()
    reserved = sizes["reserved_bytes"]["all"]
    return MemoryUse(
        **host,
        tensor_bytes=sizes["allocated_bytes"]["all"]["current"],
        reserved_bytes=reserved["current"],
        reserved_peak_bytes=reserved["peak"],
    )


def own_bytes(sizes: dict[str, int]) -> int:
    """Returns the host memory that no other process has; all of it where the kernel (gVisor) cannot tell."""
    return sizes.get("RssAnon", sizes.get("VmRSS", 0))


def status(process: str) -> dict[str, int]:
    """Returns the sizes in bytes that Linux states of a process. A zombie has none.

    Raises:
        OSError: there is no such process.
    """
    lines = (line.split() for line in (PROCESSES / process / "status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[2:] == ["kB"]}


def available_bytes() -> int:
    """Returns the bytes of this host's memory that processes can still have, under the limit of a container."""
    return min(psutil.virtual_memory().available, _left_to_container())


def _left_to_container() -> int:
    """Returns what the limit of the cgroup leaves, of which the kernel can empty the page cache. A large number where
    there is none."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return sys.maxsize if limit == "max" else int(limit) - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return sys.maxsize


def of_role(role: str, uses: Iterable[MemoryUse]) -> dict[str, float]:
    """Returns metrics of the process of a role that uses most. Nothing without processes."""
    found = list(uses)
    if not found:
        return {}
    return {
        f"memory/{role}_current_bytes": float(max(each.current_bytes for each in found)),
        f"memory/{role}_peak_bytes": float(max(each.peak_bytes for each in found)),
    }
