"""Restarts of trainer ranks: if one dies, all restart from the last checkpoint."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlframe.megatron.driver.rank_group import RankGroup
from rlframe.utils.errors import NodeDied, RlframeError, WorkerDied

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Restarts:
    """Repeats work if a trainer rank died during it or before it, at most `cluster.max_restarts` times.

    Only the end of a process counts. A failed proof, a user's error or a rank that raises would occur again, and ends
    the run. So does a rank that hangs, after the limit of its phase.
    """

    def __init__(self, limit: int, groups: Sequence[RankGroup], *, start_anew: Callable[[], str]):
        """
        Args:
            groups: groups whose ranks are restarted.
            start_anew: restarts the ranks and resets the run to its last checkpoint, which it names.
        """
        self._limit, self._groups, self._start_anew = limit, groups, start_anew
        self.num_restarts = 0

    def retry_after_restart(self, work: Callable[[], T]) -> T:
        """Runs `work`, which begins at the last checkpoint each time it is called, and returns its result.

        Raises:
            WorkerDied: no restart is left.
            NodeDied: the node of a rank is gone.
            RlframeError: the work failed without a death.
        """
        death: WorkerDied | None = None
        while True:
            try:
                if death:
                    self._restart(death)
                result = work()
                # A rank may die after it has done its part, when nothing waits for it.
                if deaths := self._deaths():
                    raise deaths[0]
                return result
            except NodeDied:
                # Its devices are gone, so the ranks cannot restart where they were.
                raise
            except RlframeError as error:
                death = self._death(error)

    def _deaths(self) -> list[WorkerDied]:
        return [death for group in self._groups for death in group.workers.deaths()]

    def _restart(self, death: WorkerDied) -> None:
        logger.warning("%s", death)
        where = self._start_anew()
        left = self._limit - self.num_restarts
        logger.warning(
            "restarted the trainer's ranks from %s; cluster.max_restarts=%d leaves %d more", where, self._limit, left
        )

    def _death(self, error: RlframeError) -> WorkerDied:
        """Returns the death behind `error`, and counts it. Raises `error` if there is none, and the death if no restart
        is left."""
        deaths = self._deaths()
        if not deaths:
            raise error
        # The failed call may name the rank and its work, or may only have suffered from its end.
        named = isinstance(error, WorkerDied) and any(headline(death) in str(error) for death in deaths)
        death = error if named and isinstance(error, WorkerDied) else WorkerDied(f"{deaths[0]}\nIt ended: {error}")
        if self.num_restarts == self._limit:
            used = f"cluster.max_restarts={self._limit}: the trainer's ranks are not restarted again"
            raise WorkerDied(f"{death}\n{used}") from error
        self.num_restarts += 1
        return death


def headline(death: WorkerDied) -> str:
    """Returns which rank died, such as `policy rank 1 (pid 7 on host) died`."""
    return str(death).partition(" in ")[0]
