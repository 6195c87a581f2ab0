"""The seconds in which something was under way."""

import asyncio
from types import SimpleNamespace

import pytest

from rlframe.attempts import busy
from rlframe.attempts.busy import Busy
from rlframe.attempts.fleet import idle_since
from rlframe.attempts.runner import Load


def test_calls_that_overlap_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr(busy, "time", SimpleNamespace(monotonic=lambda: next(times)))
    calls = Busy()
    calls.begin()  # at 10
    calls.begin()
    assert calls.seconds(12.0) == 2.0 and calls.running == 2
    calls.end()
    calls.end()  # at 14
    assert calls.seconds(19.0) == 4.0
    calls.begin()  # at 20
    calls.end()  # at 21
    assert calls.seconds(99.0) == 5.0


def test_a_call_that_fails_has_ended() -> None:
    async def fail() -> None:
        raise KeyError

    calls = Busy()
    with pytest.raises(KeyError):
        asyncio.run(calls.during(fail)())
    assert calls.running == 0


def test_idle_is_what_is_left_of_the_time_between_two_looks() -> None:
    before = Load(now_s=100.0, busy_s=[5.0, 5.0], rewards_busy_s=1.0)
    # Of 10 s one engine worked 6 and the other 2, rewards 1.
    now = Load(now_s=110.0, busy_s=[11.0, 7.0], rewards_busy_s=2.0)
    assert idle_since(before, now) == pytest.approx(
        {"time/engine_idle_fraction": 0.6, "time/reward_idle_fraction": 0.9}
    )
    anew = Load(now_s=111.0, busy_s=[0.0, 0.0], rewards_busy_s=0.0)
    assert idle_since(now, anew) == {}, "a runner that was replaced counts from its beginning"
    assert idle_since(now, now) == {}
    other = Load(now_s=111.0, busy_s=[30.0, 0.0], rewards_busy_s=2.0)
    assert idle_since(now, other) == {}, "so does one whose first engine has already worked more"
