"""The errors a run can end with. Each is picklable, because it may cross a process border."""


class RlframeError(Exception):
    """Base of every error rlframe raises on purpose. Its text is for the person who reads the terminal."""


class ConfigError(RlframeError, ValueError):
    """One or more faults of a configuration, all listed at once, found before anything expensive starts."""

    def __init__(self, faults: list[str]):
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        noun = "fault" if len(self.faults) == 1 else "faults"
        lines = "".join(f"\n  - {fault}" for fault in self.faults)
        return f"the configuration has {len(self.faults)} {noun}:{lines}"


class DataError(RlframeError, ValueError):
    """A dataset that is missing, empty or malformed: names the file, the line and what was expected."""


class CheckpointError(RlframeError, ValueError):
    """A model folder or checkpoint that cannot be read: names the file and the tensor."""


class OutputError(RlframeError, RuntimeError):
    """A file of a run that cannot be written: names it, says what the system said and what to do."""


class WorkerDied(RlframeError, RuntimeError):
    """A worker process ended or hung: names role, rank and node, and carries its last log lines."""


class EngineDied(WorkerDied):
    """A rollout engine's own processes ended, while the actor that owns them lives: the engine is made anew."""


class WeightSyncFailed(RlframeError, RuntimeError):
    """Weights did not arrive as published: names the tensor, the ranks and the box."""


class WeightsDrifted(RlframeError, RuntimeError):
    """Weights in a rank's memory that are not those of their copies, or not what was loaded: names tensor and rank."""


class RewardError(RlframeError, ValueError):
    """A reward that cannot be built or imported. (A reward that fails on one rollout is a metric, not an error.)"""
