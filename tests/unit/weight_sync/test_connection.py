"""What the two sides of a sync tell when they fail."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlframe.utils.errors import WeightSyncFailed, WorkerDied
from rlframe.weight_sync.connection import both
from tests.until import PATIENCE_S


class Released:
    """A Rendezvous of which the sides only need that it can be given up."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.threads = ThreadPoolExecutor(max_workers=2)

    def release(self) -> None:
        self.event.set()


def fails(error: Exception, *, after: threading.Event | None = None) -> Any:
    def call() -> None:
        # It is set by who has seen the other one, so that the two are never done at the same look.
        assert after is None or after.wait(PATIENCE_S)
        raise error

    return call


@pytest.mark.parametrize("cause_first", [True, False])
def test_of_two_errors_the_one_that_came_before_the_others_were_released_is_told(cause_first: bool):
    rendezvous: Any = Released()
    cause = fails(WeightSyncFailed("unhandled cuda error"))
    consequence = fails(WeightSyncFailed("another rank of this sync failed"), after=rendezvous.event)
    with pytest.raises(WeightSyncFailed, match="unhandled cuda error"):
        both(*((cause, consequence) if cause_first else (consequence, cause)), rendezvous)


def test_a_death_is_told_before_what_came_of_it():
    rendezvous: Any = Released()
    death = fails(WorkerDied("rank 1 died"), after=rendezvous.event)
    with pytest.raises(WorkerDied, match="rank 1 died"):
        both(fails(WeightSyncFailed("a peer is gone")), death, rendezvous)
