"""The interface of what gives a loop the groups that it trains on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rlframe.types.rollout import Group


class GroupSource(Protocol):
    """Gives a loop the groups that it trains on."""

    def collect(self, step: int) -> list[Group]:
        """Returns the scored groups of step `step`."""
        ...

    def settle(self, step: int) -> None:
        """Records that the policy has been trained on the groups of step `step`."""
        ...

    def reset(self) -> None:
        """Forgets everything that is under way."""
        ...

    @property
    def untrained(self) -> Sequence[tuple[int, int]]:
        """Returns the tokens, and those among them that the policy sampled, of each sequence of the last collected step
        that is not trained on."""
        ...

    @property
    def in_flight(self) -> bool:
        """Returns whether attempts are under way between steps."""
        ...

    def hold(self, step: int) -> Callable[[Path], None]:
        """Returns what writes to a folder what is under way after `step`. May move the position of the data."""
        ...

    def go_on(self, folder: Path) -> None:
        """Begins again what `hold` has written, if it has."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns metrics about the last collected step that only the source knows."""
        ...
