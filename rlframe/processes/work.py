"""The work of a pool, its limits, and the outcome of a task. Light: workers import it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlframe.utils.errors import RlframeError

ANSWER_BYTES = 1 << 16


class PoolError(RlframeError, RuntimeError):
    """Workers that cannot be started."""


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
    """Seconds that one task may take."""
    memory_gb: float
    """GiB of one process."""
    answer_bytes: int = ANSWER_BYTES
    """Greatest size of a task's value, as JSON."""


class Work(ABC):
    """Base of the work that workers do. It is pickled to each of them, so its module must be light.

    A pool knows one Work. Environments and rewards that are to share processes are a `Several`.
    """

    @abstractmethod
    def prepare(self) -> Callable[[Any], Any]:
        """Returns what does a task: given one, it returns a value that JSON can say, or raises. Called once in each
        worker, where code of the user's may be imported; what it raises ends the pool."""


@dataclass(frozen=True, slots=True)
class Several(Work):
    """Several kinds of work in the same processes. A task is the name of one with a task of its."""

    works: Mapping[str, Work]

    def prepare(self) -> Callable[[Any], Any]:
        """See Work."""
        prepared = {name: work.prepare() for name, work in self.works.items()}

        def run(task: tuple[str, Any]) -> Any:
            name, own = task
            return prepared[name](own)

        return run
