"""The thread that brings engines back while the policy trains: what it does with their failures, and when it ends."""

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from rlframe.attempts import mending
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.mending import Mender
from rlframe.utils.errors import WorkerDied


class Engines:
    """What the mender asks of attempts: `mend`, which tells the test of each look."""

    def __init__(self, mend: Callable[[], list[int]]):
        self._mend = mend
        self.looked = threading.Event()

    def mend(self) -> list[int]:
        self.looked.set()
        return self._mend()


def mender_of(mend: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch) -> tuple[Mender, Engines]:
    """Returns a mender that looks without a pause."""
    monkeypatch.setattr(mending, "LOOK_S", 0.001)
    engines = Engines(mend)
    return Mender(cast(Attempts, engines)), engines


def dead() -> Any:
    """No restart is left."""
    raise WorkerDied("rollout rank 0 died in is_alive")


def test_engines_are_looked_after_from_the_begin_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    mender, engines = mender_of(lambda: [1], monkeypatch)
    mender.end()
    for _ in range(2):
        mender.begin()
        assert engines.looked.wait(60)
        mender.end()
        engines.looked.clear()
    assert not engines.looked.wait(0.05)


def test_an_engine_that_does_not_come_back_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mender, engines = mender_of(dead, monkeypatch)
    mender.begin()
    assert engines.looked.wait(60)
    with pytest.raises(WorkerDied, match="rollout rank 0 died"):
        mender.end()


def test_what_failed_because_the_trainer_died_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mender, engines = mender_of(dead, monkeypatch)
    mender.begin()
    assert engines.looked.wait(60)
    mender.forget()
    assert "rollout rank 0 died" in caplog.text
    mender.begin()
    mender.forget()
