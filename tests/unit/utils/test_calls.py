"""Calls that travel to another process."""

import pickle
from typing import Protocol

from rlframe.cluster.worker import forwarded
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank, SourceRank


class Counter(Protocol):
    """A border."""

    def add(self, number: int, times: int) -> int:
        """Returns the sum so far."""
        ...

    def carry(self, call: RankCall) -> int:
        """Passes a call on."""
        ...


class Abacus:
    """What is behind it."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int, times: int) -> int:
        self.total += number * times
        return self.total


def test_a_call_is_carried_out_by_the_ranks_own_method() -> None:
    abacus = Abacus()
    # 3 * 2 = 6, then 6 + 1 * 4 = 10.
    assert RankCall.of(Counter.add, 3, 2).on(abacus) == 6
    assert RankCall.of(Counter.add, 1, 4).on(abacus) == 10


def test_a_call_travels_by_the_name_of_its_method() -> None:
    call = RankCall.of(SourceRank.memory, "shm")
    arrived = pickle.loads(pickle.dumps(call))
    assert arrived == call and arrived.method is SourceRank.memory


def test_messages_name_what_is_asked_in_the_end() -> None:
    inner = RankCall.of(DestinationRank.digests)
    outer = RankCall.of(Counter.carry, inner)
    assert (str(inner), str(outer), outer.name) == ("digests", "digests", "carry")
    assert [forwarded((inner,)), forwarded(([inner, inner],)), forwarded(("shm",)), forwarded(())] == [
        "(digests)",
        "(digests)",
        "",
        "",
    ]
