"""When the ranks and the engines prove their weights."""

from threading import Event
from typing import Any

import pytest

from rlframe.loops.phases import Phases
from rlframe.loops.proving import Prover


class Group:
    """Stands where a group of ranks would, and counts."""

    def __init__(self) -> None:
        self.proofs = 0

    def prove(self) -> None:
        self.proofs += 1


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 0, 0, 0]), (2, [0, 1, 1, 2])])
def test_all_groups_prove_their_weights_every_so_many_steps(every: int, expected: list[int]) -> None:
    groups: Any = [Group(), Group()]
    phase = Phases(sharing=[], announce=lambda name: None)
    prover, found = Prover(groups, phase, every_steps=every, asked=Event(), ask_engines=None), []
    for step in range(1, 5):
        prover.after(step)
        found.append(groups[0].proofs)
    assert found == expected and groups[1].proofs == expected[-1]
    assert ("proof" in phase.totals) == bool(every) and phase.next_step() == {}


def test_who_asks_gets_one_proof_of_ranks_and_engines() -> None:
    groups: Any = [Group()]
    asked, of_engines = Event(), []
    phase = Phases(sharing=[], announce=lambda name: None)
    prover = Prover(groups, phase, every_steps=0, asked=asked, ask_engines=lambda: of_engines.append(1))
    prover.after(1)
    asked.set()
    prover.after(2)
    prover.after(3)
    assert groups[0].proofs == len(of_engines) == 1
