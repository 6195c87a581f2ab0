"""The version gate: who passes, who waits, who is turned away."""

import threading
import time

import pytest

from rlframe.rollout.base.gate import VersionGate
from rlframe.utils.errors import WeightSyncFailed
from tests.until import PATIENCE_S


def test_nothing_passes_before_something_is_proved() -> None:
    with pytest.raises(WeightSyncFailed, match="version None that are not verified: nothing has been compared"):
        VersionGate().enter()


def test_what_was_proved_without_a_sync_passes() -> None:
    gate = VersionGate()
    gate.commit(0)
    assert (gate.enter(), gate.version, gate.verified) == (0, 0, True)


def test_a_call_waits_for_the_sync_and_gets_the_new_version() -> None:
    gate, entered = VersionGate(), []
    gate.commit(3)
    gate.begin(4)
    waiting = threading.Thread(target=lambda: entered.append(gate.enter()))
    waiting.start()
    time.sleep(0.05)
    assert entered == [] and not gate.verified
    gate.commit(4)
    waiting.join(PATIENCE_S)
    assert entered == [4]


def test_a_failed_sync_turns_the_waiting_away_with_its_reason() -> None:
    gate, refused = VersionGate(), []

    def enter() -> None:
        try:
            gate.enter()
        except WeightSyncFailed as error:
            refused.append(str(error))

    gate.begin(4)
    waiting = threading.Thread(target=enter)
    waiting.start()
    gate.fail("tensor x did not arrive")
    waiting.join(PATIENCE_S)
    enter()
    assert refused == ["the engine holds weights of version 4 that are not verified: tensor x did not arrive"] * 2


def test_the_wait_has_an_end() -> None:
    gate = VersionGate()
    gate.begin(4)
    with pytest.raises(WeightSyncFailed, match=r"waited 0.05 s for the weight sync to version 4"):
        gate.enter(timeout_s=0.05)


def test_a_commit_must_be_of_the_version_that_came() -> None:
    gate = VersionGate()
    gate.begin(4)
    with pytest.raises(AssertionError):
        gate.commit(5)
