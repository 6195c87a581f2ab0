"""The memory of processes on a device, part by part and phase by phase."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """The phases of a step that differ in what devices hold."""

    GENERATION = "generation"
    LOGPROBS = "logprobs"
    """Forward passes of models in ranks: of the policy, the reference, a teacher, a reward model."""
    CRITIC = "critic"
    """Values, and the training of the critic."""
    TRAIN = "train"
    SYNC = "weight sync"


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that something takes on a device."""

    name: str
    bytes: float
    measured: bool = True
    """Whether it follows from sizes or measurements. Otherwise only its order of magnitude is known, and no run is
    refused for it."""
    again: float = 0.0
    """Bytes that torch's allocator reserves besides, see constants.LOGITS_AGAIN."""


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

    def reserved_at(self, phase: Phase) -> float:
        """Returns the bytes that the device counts as taken in a phase. Torch's allocator gives back what it has
        reserved only when the process sleeps, or under pressure."""
        works = phase in self.work
        if not self.keeps or (self.asleep is not None and not works):
            return total(self.at(phase))
        most = self.work[phase] if self.asleep is not None else max(self.work.values(), key=reserved, default=())
        return reserved((*self.resident, *most))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The memory of a device whose roles are the same as those of `count` devices."""

    count: int
    processes: tuple[Process, ...]
    phases: tuple[Phase, ...]

    @property
    def names(self) -> list[str]:
        """The roles on the device."""
        return [process.role for process in self.processes]

    @property
    def roles(self) -> str:
        """The same in words."""
        return ", ".join(self.names)

    def at(self, phase: Phase) -> list[tuple[str, Part]]:
        """Returns the parts of a phase, each with its role."""
        return [(process.role, part) for process in self.processes for part in process.at(phase) if part.bytes]

    def bytes_at(self, phase: Phase) -> float:
        """Returns the bytes of a phase."""
        return total(part for _, part in self.at(phase))

    def reserved_bytes_at(self, phase: Phase) -> float:
        """Returns the bytes that the device counts as taken in a phase."""
        return sum(process.reserved_at(phase) for process in self.processes)

    def certain_bytes_at(self, phase: Phase) -> float:
        """Returns the bytes of a phase without the parts of which only the order of magnitude is known."""
        return total(part for _, part in self.at(phase) if part.measured)

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


def reserved(parts: Iterable[Part]) -> float:
    """Returns the bytes that torch's allocator reserves for all parts."""
    return sum(part.bytes + part.again for part in parts)
