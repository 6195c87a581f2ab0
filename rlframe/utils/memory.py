"""Memory of this process."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Memory of a process: of its device what torch's allocator has reserved, on a CPU what is resident."""

    current_bytes: int
    peak_bytes: int
    """The greatest so far."""


def used() -> MemoryUse:
    """Returns the memory of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return MemoryUse(current_bytes=torch.cuda.memory_reserved(), peak_bytes=torch.cuda.max_memory_reserved())
    # Of Linux, with sizes in KiB.
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    current, peak = (int(lines[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
    return MemoryUse(current_bytes=current, peak_bytes=peak)


def of_role(role: str, uses: Iterable[MemoryUse]) -> dict[str, float]:
    """Returns metrics of the process of a role that uses most. Nothing without processes."""
    found = list(uses)
    if not found:
        return {}
    return {
        f"memory/{role}_current_bytes": float(max(each.current_bytes for each in found)),
        f"memory/{role}_peak_bytes": float(max(each.peak_bytes for each in found)),
    }
