"""What attempts wait for besides engines, as their runner tells the driver, whose watchdog says it."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.attempts import waits as module
from rlframe.attempts.fleet import LATE_S
from rlframe.attempts.runner import News, Runner
from rlframe.attempts.turns import Sides, Task
from rlframe.attempts.waits import Waits
from rlframe.attempts.worker import marked_result
from rlframe.cluster.watch.activities import ACTIVITIES, FRESH_S
from rlframe.cluster.watch.marks import begin_marks, end_marks
from rlframe.cluster.watch.report import account
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams
from rlframe.types.wait import Wait
from tests.local_attempts import opening
from tests.unit.attempts.simulated.clock import simulated
from tests.unit.attempts.simulated.machines import RunnerProcess, Sideshow
from tests.unit.attempts.simulated.settings import drawn
from tests.unit.attempts.simulated.world import Driver, SimulatedAttempts, World

ONE_AT_A_TIME = "a call may take 5 s: reward.timeout_s; one runs at a time: reward.workers"
LIMIT = "a turn may take 60 s: environment.step_timeout_s"


def group(name: str, size: int) -> Group:
    return Group.begin(name, Prompt(id=name, text="", input=ModelInput((1,)), answer="x"), size)


async def answers(requests: list[GenerationRequest]) -> list[Completion]:
    """Answers at once."""
    found = Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)
    return [found for _ in requests]


async def never(rollout: Any) -> None:
    """Ends never."""
    await asyncio.Event().wait()


def runner_of(sides: Sides) -> Runner:
    return Runner([answers], sides, run_seed=0, max_calls=1, max_positions=1024, attempt_timeout_s=3600)


def task(name: str, size: int) -> Task:
    return Task(group=group(name, size), sampling=SamplingParams(max_tokens=4), step=1)


def test_waits_are_counted_with_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [10.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    waits = Waits()
    assert waits.told("a tool", "no limit") == []
    with waits.one():
        now_s[0] = 14.0
        with waits.one():
            now_s[0] = 15.0
            assert waits.told("a tool", "no limit") == [Wait(number=2, what="a tool", longest_s=5.0, limit="no limit")]
        assert waits.told("a tool", "no limit") == [Wait(number=1, what="a tool", longest_s=5.0, limit="no limit")]
    with pytest.raises(KeyError), waits.one():
        raise KeyError
    assert waits.told("a tool", "no limit") == []


def test_a_wait_is_a_sentence() -> None:
    wait = Wait(number=1, what="reward.parts.http", longest_s=63.7, limit=ONE_AT_A_TIME)
    assert str(wait) == f"1 attempt waits for reward.parts.http, 64 s so far ({ONE_AT_A_TIME})"
    wait = Wait(number=12, what="the environment shop", longest_s=3.0, limit=LIMIT)
    assert str(wait) == f"12 attempts wait for the environment shop, up to 3 s so far ({LIMIT})"


def test_the_runner_tells_of_attempts_that_wait_for_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))

    async def observe(rollout: Rollout) -> None:
        if rollout.prompt.id == "hangs":
            await never(rollout)

    async def nothing(rollout: Rollout) -> None:
        pass

    async def opens_never(rollout: Rollout, **named: Any) -> Any:
        await never(rollout)

    async def waits_after(seconds: float, open: Any) -> Sequence[Wait]:
        runner = runner_of(Sides(decode=str, open=open, score=nothing))
        runner.start([task("hangs", 3), task("ends", 2)], version=0)
        await asyncio.sleep(seconds)
        return (await runner.news(0)).waits

    (wait,) = simulated(waits_after(64.0, opening(observe)))
    assert wait == Wait(number=3, what="the environment single_turn", longest_s=wait.longest_s, limit=LIMIT)
    assert wait.longest_s == pytest.approx(64.0)
    # An environment that does not begin is waited for too, though the first word of its attempts is the engine's.
    (wait,) = simulated(waits_after(64.0, opens_never))
    assert (wait.number, wait.what) == (5, "the environment single_turn")


def test_the_runner_tells_of_what_its_sides_wait_for() -> None:
    wait = Wait(number=2, what="reward.parts.http", longest_s=1.0, limit=ONE_AT_A_TIME)

    async def run() -> Sequence[Wait]:
        runner = runner_of(Sides(decode=str, open=opening(lambda rollout: None), score=never, waits=lambda: [wait]))
        runner.start([task("a", 2)], version=0)
        await asyncio.sleep(1)
        return (await runner.news(0)).waits

    assert simulated(run()) == [wait]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimulatedAttempts]:
    """Attempts in simulated processes, none of which die. Their environment hangs."""
    monkeypatch.setattr(Sideshow, "observe", lambda self, rollout: never(rollout))
    world = World(replace(drawn(0), lag=0, group_size=3).as_plain(), tmp_path)
    yield Driver(world).attempts
    world.loop.end()


def test_the_driver_knows_what_attempts_wait_for(attempts: SimulatedAttempts) -> None:
    attempts.start([attempts.task(group("a", 3), step=1)])
    with attempts.waiting() as activity:
        attempts.look(wait_s=1.0)
        (wait,) = activity.known_waits()
        assert (wait.number, wait.what) == (3, "the environment single_turn")
        said = account(activity)
        assert said.startswith("3 attempts wait for the environment single_turn, up to ")
        assert "the driver" not in said
        # The driver has not asked for long, so that nobody knows.
        activity.told_s -= FRESH_S
        assert account(activity).startswith("the driver itself is late")


def test_a_runner_that_does_not_answer_is_what_the_driver_waits_for(
    monkeypatch: pytest.MonkeyPatch, attempts: SimulatedAttempts
) -> None:
    news, late, delays_s = RunnerProcess.news, list[bool](), [LATE_S + 1.0, LATE_S - 1.0]
    monkeypatch.setattr(attempts.workers, "note_pending", lambda activity, ranks: late.append(list(ranks) == [0]))

    async def news_after(self: RunnerProcess, wait_s: float) -> News:
        await asyncio.sleep(delays_s.pop())
        return await news(self, wait_s)

    monkeypatch.setattr(RunnerProcess, "news", news_after)
    with attempts.waiting():
        attempts.look(wait_s=1.0)
        assert late == []
        attempts.look(wait_s=1.0)
        assert late == [True]


def test_the_rewards_of_a_batch_mark_what_they_wait_for_when_it_changes(tmp_path: Path) -> None:
    work: Future[str] = Future()
    page = begin_marks(tmp_path / "runner-0.mark")
    told = iter([3, 3, 1, 1, 1])
    seen: list[tuple[int, str]] = []

    def waits() -> list[Wait]:
        seen.append((page.read().number, page.read().text))
        if (number := next(told, 0)) == 0:
            work.set_result("done")
            return []
        return [Wait(number=number, what="reward.parts.http", longest_s=float(len(seen)), limit=ONE_AT_A_TIME)]

    try:
        assert marked_result(work, waits, every_s=0.001) == "done"
    finally:
        end_marks()
    three = f"rewards: 3 attempts wait for reward.parts.http ({ONE_AT_A_TIME})"
    one = f"rewards: 1 attempt waits for reward.parts.http ({ONE_AT_A_TIME})"
    assert seen == [(0, ""), (2, three), (2, three), (4, one), (4, one), (4, one)]


def test_rewards_and_environments_that_answer_are_progress(
    monkeypatch: pytest.MonkeyPatch, attempts: SimulatedAttempts
) -> None:
    async def slow(rollout: Rollout) -> None:
        await asyncio.sleep({"quick": 10.5, "slow": 1e5}[rollout.prompt.id])

    monkeypatch.setattr(Sideshow, "observe", lambda self, rollout: slow(rollout))
    attempts.start([attempts.task(group(name, 3), step=1) for name in ("quick", "slow")])
    changes = []
    with attempts.waiting():
        for _ in range(14):
            before = ACTIVITIES.num_changes
            attempts.look(wait_s=1.0)
            changes.append(ACTIVITIES.num_changes - before)
    # First all environments begin. The three answers of one moment are in one of the later looks.
    assert changes[0] == 1 and sorted(changes[1:]) == [0] * 12 + [1]
