"""Recognises that a worker's memory has run out, and says what its device held."""

import pathlib
import sys
import traceback

from rlframe.utils.errors import OutOfMemory, RlframeError

SIGNS = (
    "CUDA out of memory",
    "DefaultCPUAllocator",
    "torch.OutOfMemoryError",
    # vLLM 0.26 and 0.32, at the start.
    "No available memory for the cache blocks",
    "is less than desired GPU memory utilization",
    "larger than the available KV cache memory",
    # SGLang 0.5.
    "Not enough memory. Please try to increase --mem-fraction-static",
)
"""Words of allocators and engines. The CPU's raises a plain RuntimeError; an engine's process leaves only its log."""
STARTS = "start"
TAIL_BYTES = 1 << 16
"""Bytes at the end of the log in which an engine's own words are looked for."""


def named(error: Exception, *, role: str, rank: int, call: str, log: pathlib.Path, begin: int) -> Exception:
    """Returns an OutOfMemory if `error` stands for one, else `error`.

    Args:
        call: the worker's method that raised it.
        begin: size of the log when this process began.
    """
    if isinstance(error, RlframeError):
        return error
    said = sign_of(error) or (sign_in(log, begin) if call.startswith(STARTS) else "")
    if not said:
        return error
    # The traceback stays here: the driver shows the sentence.
    traceback.print_exception(error, file=sys.stderr)
    device, size, held = held_here()
    return OutOfMemory(role, rank, call, f"{said} ({log} has the stack)", device, size, held)


def sign_of(error: Exception) -> str:
    """Returns the first line of an allocator's error. Empty for any other error."""
    text = str(error)
    if isinstance(error, MemoryError):
        return text or "no memory for a Python object"
    known = type(error).__name__ == "OutOfMemoryError" or any(sign in text for sign in SIGNS)
    return text.partition("\n")[0] if known else ""


def sign_in(log: pathlib.Path, begin: int) -> str:
    """Returns the last line of the log, after its first `begin` bytes, in which memory has run out. Empty if there is
    none."""
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            file.seek(max(begin, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if any(sign in line for sign in SIGNS)), "")


def held_here() -> tuple[str, int, str]:
    """Returns the name and the bytes of this process's device, and what it held, in words. Empty on a CPU; a name alone
    if only the engine's own processes use the device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        # Counting initialises nothing: it would take memory where none is left.
        return ("its device" if torch is not None and torch.cuda.device_count() else ""), 0, ""
    free, size = torch.cuda.mem_get_info()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    words = (
        f"of {size / 1e9:.1f} GB this process held {held / 1e9:.1f} in tensors, {reserved / 1e9:.1f} with what its "
        f"allocator keeps; others held {max(0, size - free - reserved) / 1e9:.1f}, {free / 1e9:.1f} were free"
    )
    return torch.cuda.get_device_name(), size, words
