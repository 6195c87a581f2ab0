"""When the ranks prove their weights."""

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
    prover, found = Prover(groups, phase, every_steps=every), []
    for step in range(1, 5):
        prover.after(step)
        found.append(groups[0].proofs)
    assert found == expected and groups[1].proofs == expected[-1]
    assert ("proof" in phase.totals) == bool(every) and phase.next_step() == {}
