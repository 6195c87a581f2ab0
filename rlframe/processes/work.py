"""The work of a pool, its limits, and the outcome of a task. Light: workers import it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlframe.utils.errors import RlframeError

ANSWER_BYTES = 1 << 16


class PoolError(RlframeError, RuntimeError):
    """Raised if workers cannot be started."""


class TaskFailed(Exception):
    """Raised by a task to fail with exactly this sentence."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A task that has no value."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Holds the limits of a worker."""

    timeout_s: float
    """Seconds that one task may take, unless its Work says otherwise."""
    memory_gb: float
    """Greatest memory of one process, in GiB."""
    first_s: float = 0.0
    """Seconds that the first task of a kind may take at least in each process: it may import what the others use."""
    answer_bytes: int = ANSWER_BYTES
    """Greatest size of a task's value, as JSON."""


class Work(ABC):
    """Base of the work that workers do. It is pickled to each of them, so its module must be light.

    A pool runs one Work. `Several` lets environments and rewards share processes.
    """

    @abstractmethod
    def prepare(self) -> Callable[[Any], Any]:
        """Returns the function that runs a task. It returns a value that can be written as JSON, or raises.

        Called once in each worker, where the user's code may be imported. An exception raised here ends the pool.
        """

    def limit_s(self, task: Any, limits: Limits) -> float:
        """Returns the seconds that `task` may take."""
        return limits.timeout_s

    def kind(self, task: Any) -> str:
        """Returns a name of what `task` has in common with others; see Limits.first_s."""
        return ""


@dataclass(frozen=True, slots=True)
class Several(Work):
    """Several kinds of work in the same processes. A task is a pair: the name of a kind and a task of that kind."""

    works: Mapping[str, Work]

    def prepare(self) -> Callable[[Any], Any]:
        """See Work."""
        prepared = {name: work.prepare() for name, work in self.works.items()}

        def run(task: tuple[str, Any]) -> Any:
            name, own = task
            return prepared[name](own)

        return run

    def limit_s(self, task: tuple[str, Any], limits: Limits) -> float:
        """See Work."""
        name, own = task
        return self.works[name].limit_s(own, limits)

    def kind(self, task: tuple[str, Any]) -> str:
        """See Work."""
        name, own = task
        return f"{name} {self.works[name].kind(own)}"
