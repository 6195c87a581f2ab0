"""Admission: how many attempts beside those of training may be under way."""

from collections import deque
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Admission(Generic[Work]):
    """Work beside other work, which begins as long as it is at most a share of what is under way.

    Example:
        >>> admission = Admission(0.25)
        >>> admission.begin(6)
        >>> admission.wait("a", size=1), admission.wait("b", size=1), admission.wait("c", size=1)
        (None, None, None)
        >>> admission.admitted()
        ['a', 'b']
    """

    def __init__(self, share: float):
        """
        Args:
            share: greatest fraction of the attempts under way.
        """
        self._share = share
        self._is_lifted = False
        self._under_way = {False: 0, True: 0}
        """Number of attempts under way, of other work and of work beside it."""
        self._waiting: deque[tuple[Work, int]] = deque()

    def begin(self, count: int, *, aside: bool = False) -> None:
        """Counts attempts that begin."""
        self._under_way[aside] += count

    def end(self, *, aside: bool) -> None:
        """Counts an attempt that has ended."""
        self._under_way[aside] -= 1

    def wait(self, work: Work, *, size: int) -> None:
        """Makes work beside the other wait until `admitted` returns it, within the limit from here on.

        Args:
            size: number of its attempts.
        """
        self._is_lifted = False
        self._waiting.append((work, size))

    def lift(self) -> None:
        """Admits everything that waits."""
        self._is_lifted = True

    def admitted(self) -> list[Work]:
        """Returns the work that may begin now, whose attempts are counted. One piece may begin in any case, and all of
        it where nothing else is under way."""
        found = []
        while self._waiting and self._has_room(self._waiting[0][1]):
            work, size = self._waiting.popleft()
            self.begin(size, aside=True)
            found.append(work)
        return found

    def _has_room(self, size: int) -> bool:
        aside, others = self._under_way[True] + size, self._under_way[False]
        return self._is_lifted or not others or aside == size or aside <= self._share * (aside + others)
