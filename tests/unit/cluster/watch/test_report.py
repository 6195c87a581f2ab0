"""What a report says that no worker is to blame for: what attempts wait for."""

import pytest

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.watch import watchdog as module
from rlframe.cluster.watch.activities import FRESH_S, Activity
from rlframe.cluster.watch.report import account
from rlframe.cluster.watch.watchdog import Watchdog
from rlframe.types.wait import Wait

HTTP = Wait(number=12, what="reward.parts.http", longest_s=64.2, limit="a call may take 90 s: reward.timeout_s")
SHOP = Wait(number=1, what="the environment shop", longest_s=3.0, limit="a turn may take 60 s")
SAID = (
    "12 attempts wait for reward.parts.http, up to 64 s so far (a call may take 90 s: reward.timeout_s); "
    "1 attempt waits for the environment shop, 3 s so far (a turn may take 60 s)"
)


def activity(name: str, *, is_call: bool) -> Activity:
    return Activity(name=name, limit_s=60.0, setting="cluster.phase_timeout_s", is_call=is_call)


def test_what_attempts_wait_for_is_to_blame_and_not_the_driver() -> None:
    waits = activity("generate", is_call=True)
    waits.tell([HTTP, SHOP])
    assert account(waits) == SAID


def test_it_is_told_beside_the_workers_that_are_late() -> None:
    waits = activity("generate", is_call=True)
    waits.tell([HTTP, SHOP])
    waits.not_started = ["rollout rank 1"]
    assert account(waits).splitlines()[0] == f"still waiting for rollout rank 1 (not started); {SAID}"


def test_what_was_told_too_long_ago_is_not_known_any_more() -> None:
    waits = activity("generate", is_call=True)
    waits.tell([HTTP])
    waits.told_s -= FRESH_S
    first, second, *_ = account(waits).splitlines()
    assert first == "the driver itself is late" and second.startswith("the driver (pid ")


def test_the_last_words_of_a_phase_name_what_the_wait_inside_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "end", said.append)
    outer, inner = activity("rollout", is_call=False), activity("generate", is_call=True)
    inner.tell([HTTP, SHOP])
    outer.begun_s -= outer.limit_s + module.PATIENCE_S + 1
    Watchdog(ClusterConfig())._look_after(outer, innermost=inner)
    words = "rollout took longer than 60 s (cluster.phase_timeout_s), and the driver cannot end it; "
    assert said == [words + SAID]
