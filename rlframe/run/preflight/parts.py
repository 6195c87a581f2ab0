"""The memory of processes on a device, part by part and phase by phase."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """The phases of a step that differ in what devices hold."""

    GENERATION = "generation"
    LOGPROBS = "logprobs"
    """Forward passes of models in ranks: of the policy, the reference, a critic, a reward model."""
    TRAIN = "train"
    SYNC = "weight sync"


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that something takes on a device."""

    name: str
    bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A rank or an engine on a device."""

    role: str
    resident: tuple[Part, ...]
    """Parts that it holds while it is awake."""
    asleep: tuple[Part, ...] | None = None
    """Parts that it holds while other roles work. None if it never sleeps."""
    work: Mapping[Phase, tuple[Part, ...]] = field(default_factory=dict)
    """Parts that it takes besides, in the phases in which it works."""
    keeps: bool = True
    """Whether torch's allocator keeps the memory of that work for itself while the process is awake."""

    def at(self, phase: Phase) -> tuple[Part, ...]:
        """Returns what the process holds in a phase of a run that has taken a step."""
        if phase in self.work:
            return (*self.resident, *self.work[phase])
        if self.asleep is not None:
            return self.asleep
        cached = max((total(parts) for parts in self.work.values()), default=0.0) if self.keeps else 0.0
        return (*self.resident, Part("kept by torch's allocator for the next step", cached))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The memory of a device whose roles are the same as those of `count` devices."""

    count: int
    processes: tuple[Process, ...]
    phases: tuple[Phase, ...]

    @property
    def roles(self) -> str:
        """The roles on the device."""
        return ", ".join(process.role for process in self.processes)

    def at(self, phase: Phase) -> list[tuple[str, Part]]:
        """Returns the parts of a phase, each with its role."""
        return [(process.role, part) for process in self.processes for part in process.at(phase) if part.bytes]

    def bytes_at(self, phase: Phase) -> float:
        """Returns the bytes of a phase."""
        return total(part for _, part in self.at(phase))

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=self.bytes_at)

    @property
    def peak_bytes(self) -> float:
        """Bytes of that phase."""
        return self.bytes_at(self.peak)


def total(parts: Iterable[Part]) -> float:
    """Returns the bytes of all parts."""
    return sum(part.bytes for part in parts)
