"""The errors with which a run can end. All are picklable, because they may cross a process border."""

from collections.abc import Iterable
from typing import Any

from rlframe.utils.faults import Fault, Text, as_faults


class RlframeError(Exception):
    """Base of every error that rlframe raises on purpose. Its text is for the person who reads the terminal."""


class ConfigError(RlframeError, ValueError):
    """One or more faults of a configuration, all listed at once, found before anything expensive starts."""

    def __init__(self, faults: Iterable[Fault | str]):
        self.faults = list(as_faults(faults))
        super().__init__(self.faults)

    def __str__(self) -> str:
        noun = "fault" if len(self.faults) == 1 else "faults"
        lines = "".join(f"\n  - {fault}" for fault in self.faults)
        return f"the configuration has {len(self.faults)} {noun}:{lines}"


class SettingError(RlframeError, ValueError):
    """A value that a dataclass of settings refuses. The fault's key begins with the field."""

    def __init__(self, field: str | Fault, rule: Text = "", **parts: Any):
        """Accepts a Fault, or the arguments of one."""
        self.fault = field if isinstance(field, Fault) else Fault(field, rule, **parts)
        super().__init__(self.fault)

    def __str__(self) -> str:
        return str(self.fault)


class UsageError(RlframeError, ValueError):
    """A word of the command line that names nothing. The message has the nearest name."""


class SweepError(RlframeError, ValueError):
    """Runs of a sweep that are refused before any of them begins. The message names each with its faults."""


class DataError(RlframeError, ValueError):
    """A dataset that is missing, empty or malformed. The message names the file, the line and the expected form."""


class CheckpointError(RlframeError, ValueError):
    """A model folder or checkpoint that cannot be read. The message names the file and the tensor."""


class OutputError(RlframeError, RuntimeError):
    """A file of a run that cannot be written. The message names the file, the system's error and what to do."""


class WorkerDied(RlframeError, RuntimeError):
    """A worker process that ended or hung. The message names role, rank and node, and has its last log lines."""


class EngineDied(WorkerDied):
    """A rollout engine whose processes ended, while the actor that owns them lives. The engine is restarted."""


class NodeDied(RlframeError, RuntimeError):
    """A node of a joined cluster that is gone, with every worker on it. The message names it, and what failed first."""


class OutOfMemory(WorkerDied):
    """A rank or an engine that found no memory. The text names role, rank, call and what its device held; `explained`
    adds the prediction and advice."""

    def __init__(
        self,
        role: str,
        rank: int,
        call: str,
        said: str,
        device: str = "",
        device_bytes: int = 0,
        held: str = "",
        advice: str = "",
    ):
        """
        Args:
            call: name of the worker's method.
            said: the error of the allocator, in a line.
            device: name of the device. Empty for host memory.
            device_bytes: all memory of the device.
            held: what the device held, in words.
            advice: prediction and advice, in words.
        """
        self.role, self.rank, self.call, self.said = role, rank, call, said
        self.device, self.device_bytes, self.held, self.advice = device, device_bytes, held, advice
        super().__init__(role, rank, call, said, device, device_bytes, held, advice)

    def explained(self, advice: str) -> "OutOfMemory":
        """Returns the same error with a prediction and advice."""
        return OutOfMemory(
            self.role, self.rank, self.call, self.said, self.device, self.device_bytes, self.held, advice
        )

    def __str__(self) -> str:
        where = f" of {self.device}" if self.device else " of the host"
        lines = [f"{self.role} rank {self.rank} ran out of the memory{where} in {self.call}: {self.said}"]
        return "\n".join([*lines, *filter(None, (self.held, self.advice))])


class WeightSyncFailed(RlframeError, RuntimeError):
    """Weights that did not arrive as published. The message names the tensor, the ranks and the box."""


class WeightsDrifted(RlframeError, RuntimeError):
    """Weights in a rank's memory that differ from their copies, or from those that were loaded. The message names
    tensor and rank."""


class RewardError(RlframeError, ValueError):
    """A reward that cannot be built or imported. (A reward that fails on one rollout is a metric, not an error.)"""
