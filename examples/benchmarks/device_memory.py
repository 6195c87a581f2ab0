"""The bytes that devices hold while a benchmark runs, and how busy they are, as nvidia-smi says, of all processes."""

import os
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

SAMPLE_MS = 50
Span = tuple[str, float, float]
"""Name of a phase, and when it began and ended."""


class Memory:
    """The bytes that each device holds, and whether it computes, sampled while the block runs.

    Args:
        devices: their indices, separated by commas. None stands for the visible ones.
    """

    def __init__(self, devices: str | None = None):
        self._devices = os.environ.get("CUDA_VISIBLE_DEVICES") if devices is None else devices
        self.samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """Times and bytes by the index of the device."""
        self.busy: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """Times and the share of the last sixth of a second or more in which a kernel ran, by the same index."""

    def __enter__(self) -> "Memory":
        query = ["nvidia-smi", "--query-gpu=index,memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
        query += ["-i", self._devices] if self._devices else []
        self._process = subprocess.Popen([*query, "-lms", str(SAMPLE_MS)], stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            index, used, busy = line.split(",")
            self.samples[index].append((time.time(), float(used) * 2**20))
            self.busy[index].append((time.time(), float(busy) / 100))

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._thread.join()

    def most(self) -> dict[str, float]:
        """Returns the greatest sample of each device so far."""
        return {index: max(used for _, used in samples) for index, samples in self.samples.items()}

    def peaks(self, index: str, times: Iterable[Span]) -> dict[str, float]:
        """Returns the greatest sample of a device within each phase, less the least of all."""
        samples = self.samples[index]
        idle = min(used for _, used in samples)
        return {phase: most - idle for phase, most in peaks(samples, times).items()}

    def idle(self, index: str, times: Iterable[Span]) -> dict[str, float]:
        """Returns the share of each phase in which no kernel ran on a device."""
        return {phase: 1 - statistics.fmean(busy) for phase, busy in inside(self.busy[index], times).items()}


def peaks(samples: Iterable[tuple[float, float]], times: Iterable[Span]) -> dict[str, float]:
    """Returns the greatest sample of each phase."""
    return {phase: max(values) for phase, values in inside(samples, times).items()}


def inside(samples: Iterable[tuple[float, float]], times: Iterable[Span]) -> dict[str, list[float]]:
    """Returns the samples of each phase that has any. A sample arrives up to SAMPLE_MS after what it says was so."""
    samples = list(samples)
    found: dict[str, list[float]] = {}
    for phase, start, end in times:
        if values := [value for at, value in samples if start + SAMPLE_MS / 1000 <= at <= end]:
            found.setdefault(phase, []).extend(values)
    return found
