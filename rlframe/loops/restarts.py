"""Restarts: a run outlives its trainer ranks. When one dies, all start anew from the last checkpoint."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlframe.megatron.driver.rank_group import RankGroup
from rlframe.utils.errors import RlframeError, WorkerDied

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Restarts:
    """Does work again when a trainer rank died of it or before it, `cluster.max_restarts` times at most.

    Only the end of a process counts. A failed proof, a fault of the user's or a rank that raises would come again, and
    ends the run. So does a rank that hangs, after the limit of its phase.
    """

    def __init__(self, limit: int, groups: Sequence[RankGroup], *, start_anew: Callable[[], str]):
        """
        Args:
            groups: whose deaths are outlived.
            start_anew: starts the ranks anew and puts the run back to its last checkpoint; says which that is.
        """
        self._limit, self._groups, self._start_anew = limit, groups, start_anew
        self.num_restarts = 0

    def outlast(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns, which begins at the last checkpoint each time it is called.

        Raises:
            WorkerDied: it was one death too many.
            RlframeError: what went wrong without a death.
        """
        death: WorkerDied | None = None
        while True:
            try:
                if death:
                    self._restart(death)
                result = work()
                # A rank may die once it has done its part: nobody waits for it then.
                if deaths := self._deaths():
                    raise deaths[0]
                return result
            except RlframeError as error:
                death = self._death(error)

    def _deaths(self) -> list[WorkerDied]:
        return [death for group in self._groups for death in group.workers.deaths()]

    def _restart(self, death: WorkerDied) -> None:
        logger.warning("%s", death)
        where = self._start_anew()
        left = self._limit - self.num_restarts
        logger.warning("new ranks go on from %s; cluster.max_restarts=%d leaves %d more", where, self._limit, left)

    def _death(self, error: RlframeError) -> WorkerDied:
        """Returns the death behind `error`, and counts it. Raises `error` where there is none, and the death where it
        is one too many."""
        deaths = self._deaths()
        if not deaths:
            raise error
        # What failed may name the rank and what it did then, or only have suffered from its end.
        named = isinstance(error, WorkerDied) and any(headline(death) in str(error) for death in deaths)
        death = error if named and isinstance(error, WorkerDied) else WorkerDied(f"{deaths[0]}\nIt ended: {error}")
        if self.num_restarts == self._limit:
            used = f"cluster.max_restarts={self._limit}: the trainer's ranks are not started anew again"
            raise WorkerDied(f"{death}\n{used}") from error
        self.num_restarts += 1
        return death


def headline(death: WorkerDied) -> str:
    """Returns who died, such as `policy rank 1 (pid 7 on host) died`."""
    return str(death).partition(" in ")[0]
