"""Sessions in processes: what misbehaves ends itself alone."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlframe.attempts.sessions.calls import CannotStart, SessionFailed, Setup, Trouble
from rlframe.attempts.sessions.pool import LONE_PER_WORKER, SessionPool, try_start
from rlframe.cluster.watch.sight import State, process_state
from rlframe.environments.base import Turn
from rlframe.environments.config import EnvironmentConfig
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason
from rlframe.utils.errors import RlframeError
from tests.unit.attempts.sessions.misbehaving import GOOD, TURNS, WAYS
from tests.until import PATIENCE_S, under_a_fair_limit

pytestmark = pytest.mark.later

TURN = Turn(message={"role": "assistant", "content": "and?"}, text="and?", finish_reason=FinishReason.STOP)
HERE = "tests.unit.attempts.sessions.misbehaving:Misbehaving"
LIMIT_S = 1.0


def setup(
    *, workers: int = 1, name: str = HERE, step_timeout_s: float = LIMIT_S, options: Mapping[str, Any] | None = None
) -> Setup:
    """Settings of processes for the environment of these tests."""
    limits = {"step_timeout_s": step_timeout_s, "memory_gb": 0.5}
    config = EnvironmentConfig(name=name, workers=workers, options=dict(options or {}), **limits)
    return Setup(environment=config, folder=os.getcwd(), sources={})


def prompt(kind: str) -> Prompt:
    return Prompt(id=kind, text="Count.", input=ModelInput((1, 2)))


async def attempted(pool: SessionPool, kind: str, *, retries: int = 0) -> tuple[float, list[str]] | SessionFailed:
    """The reward and the answers of an attempt, or why it failed. One whose neighbour has ended its process begins
    again."""
    try:
        session = await pool.open(prompt(kind), seed=0, alone=retries >= 2)
        reward, answers = 0.0, []
        while True:
            step = await session.step(TURN)
            reward += step.reward
            answers += [message["content"] for message in step.messages]
            if step.is_over:
                await session.close()
                return reward, answers
            if len(answers) > 2 * TURNS:
                return SessionFailed(Trouble.NO_ANSWER, "it never ends")
    except SessionFailed as failure:
        if failure.trouble is Trouble.NEIGHBOUR and retries < 5:
            return await attempted(pool, kind, retries=retries + 1)
        return failure


async def among_good_ones(kind: str, *, limit_s: float = LIMIT_S, workers: int = 1) -> tuple[Any, list[Any]]:
    """How an attempt of one kind ends, and those of good ones that share its process."""
    pool = SessionPool(setup(workers=workers, step_timeout_s=limit_s))
    try:
        found = await asyncio.gather(*(attempted(pool, each) for each in (GOOD, kind, GOOD, GOOD)))
        found.append(await attempted(pool, GOOD))
    finally:
        pool.close()
    return found.pop(1), found


EXPECTED: dict[str, Trouble] = {
    "raises": Trouble.RAISED,
    "raises without a text": Trouble.RAISED,
    "exits": Trouble.RAISED,
    "cancels itself": Trouble.RAISED,
    "waits for ever": Trouble.TOOK_TOO_LONG,
    "ignores its cancellation": Trouble.TOOK_TOO_LONG,
    "computes for ever": Trouble.DIED,
    "blocks for ever": Trouble.DIED,
    "waits for a thread that hangs": Trouble.TOOK_TOO_LONG,
    "leaves at once": Trouble.DIED,
    "kills itself": Trouble.DIED,
    "crashes": Trouble.DIED,
    "stops itself": Trouble.DIED,
    "forks and hangs": Trouble.TOOK_TOO_LONG,
    "starts a program and waits": Trouble.DIED,
    "takes all memory": Trouble.RAISED,
    "writes a huge file": Trouble.RAISED,
    "prints without end and hangs": Trouble.DIED,
    "raises in a thread and hangs": Trouble.TOOK_TOO_LONG,
    "returns nothing": Trouble.NO_ANSWER,
    "returns text": Trouble.NO_ANSWER,
    "returns a dict": Trouble.NO_ANSWER,
    "returns a reward of nan": Trouble.RAISED,
    "returns a huge reward": Trouble.RAISED,
    "returns no message and goes on": Trouble.RAISED,
    "speaks for the policy": Trouble.RAISED,
    "returns bytes": Trouble.RAISED,
    "returns too much": Trouble.NO_ANSWER,
    "recurses for ever": Trouble.RAISED,
    "reset raises": Trouble.RAISED,
    "reset returns text": Trouble.NO_ANSWER,
    "reset waits for ever": Trouble.TOOK_TOO_LONG,
    "raises in close": Trouble.RAISED,
    "hangs in close": Trouble.TOOK_TOO_LONG,
    "closes every descriptor": Trouble.DIED,
    "exits in a task": Trouble.DIED,
    "stops the loop": Trouble.DIED,
    "interrupts itself": Trouble.TOOK_TOO_LONG,
}
"""The ways that the session itself is found guilty of."""
WHY = {
    "computes for ever": "it kept its process busy for longer than",
    "blocks for ever": "it kept its process busy for longer than",
}
"""What is said of some of them."""
BY_TIME = {Trouble.TOOK_TOO_LONG, Trouble.DIED, Trouble.NEIGHBOUR}
"""What a session may be found guilty of because of its limit of time."""
ANYHOW = sorted(set(WAYS) - set(EXPECTED))
"""Those that nobody can be found guilty of, or that do no harm. They end, and no good attempt does with them."""


def too_late(found: Any, good: list[Any], expected: Trouble | None) -> bool:
    """Whether the machine was too slow for the limit: for a good one, or for a process that is to say who is late."""
    late = [isinstance(each, SessionFailed) and each.trouble in BY_TIME for each in (*good, found)]
    return any(late[:-1]) or (late[-1] and expected is not None and found.trouble is not expected)


@pytest.mark.parametrize("kind", [*EXPECTED, *ANYHOW])
def test_a_session_that_misbehaves_ends_itself_alone(kind: str) -> None:
    found, good = under_a_fair_limit(
        lambda limit_s: asyncio.run(among_good_ones(kind, limit_s=limit_s)),
        lambda ends: not too_late(*ends, EXPECTED.get(kind)),
        first_s=LIMIT_S,
    )
    assert good == [(1.0, ["1", "2"])] * 4
    if kind in EXPECTED:
        assert isinstance(found, SessionFailed) and found.trouble is EXPECTED[kind], repr(found)
        assert WHY.get(kind, "") in str(found)


def test_an_answer_without_the_key_of_its_process_is_none() -> None:
    """Sessions can write into the pipe of the answers, and guess the number of a call."""

    async def run() -> None:
        pool = SessionPool(setup(step_timeout_s=60.0))
        try:
            session = await pool.open(prompt("waits for ever"), seed=0)
            step = asyncio.ensure_future(session.step(TURN))
            (process,) = pool._processes
            async with asyncio.timeout(PATIENCE_S):
                while not process._calls:
                    await asyncio.sleep(0.01)
            (number,) = process._calls
            assert not process._take(bytearray(json.dumps(["", number, "", "", None]).encode()))
            assert number in process._calls and not step.done()
            step.cancel()
        finally:
            pool.close()

    asyncio.run(run())


def test_a_session_alone_whose_process_ends_between_its_turns_is_the_one_that_ended_it() -> None:
    async def run() -> SessionFailed:
        before = set(psutil.Process().children())
        pool = SessionPool(setup(step_timeout_s=60.0))
        try:
            session = await pool.open(prompt("leaves later"), seed=0, alone=True)
            await session.step(TURN)
            # One is its own, another is there for the others.
            processes = set(psutil.Process().children()) - before
            async with asyncio.timeout(PATIENCE_S):
                while not any(process_state(each.pid) is State.DEAD for each in processes):
                    await asyncio.sleep(0.02)
            with pytest.raises(SessionFailed) as caught:
                await session.step(TURN)
            return caught.value
        finally:
            pool.close()

    failure = asyncio.run(run())
    assert failure.trouble is Trouble.DIED and "ended its process" in str(failure)


async def processes_of(pool: SessionPool, number: int) -> list[int]:
    """How many of some sessions, opened at once, each process has."""
    try:
        sessions = await asyncio.gather(*(pool.open(prompt(GOOD), seed=0) for _ in range(number)))
        return sorted(Counter([(await session.step(TURN)).metrics["process"] for session in sessions]).values())
    finally:
        pool.close()


def starting(folder: Path, *, workers: int, failures: int = 0) -> Setup:
    """Settings of processes of which the first ones do not start."""
    options = {"folder": str(folder), "failures": failures}
    return setup(workers=workers, name="tests.unit.attempts.sessions.starting:Starting", options=options)


def test_sessions_are_spread_over_processes_that_are_not_ready_yet(tmp_path: Path) -> None:
    async def run() -> list[int]:
        return await processes_of(SessionPool(starting(tmp_path, workers=2)), 6)

    assert asyncio.run(run()) == [3, 3]


def test_a_process_that_does_not_start_counts_once_however_many_wait_for_it(tmp_path: Path) -> None:
    async def run(folder: Path, failures: int) -> list[int]:
        folder.mkdir()
        return await processes_of(SessionPool(starting(folder, workers=1, failures=failures)), 4)

    assert asyncio.run(run(tmp_path / "two", 2)) == [4]
    with pytest.raises(RlframeError, match="cannot start: .*not yet"):
        asyncio.run(run(tmp_path / "three", 3))


def test_sessions_alone_have_a_limited_number_of_processes() -> None:
    async def most() -> int:
        pool, found = SessionPool(setup()), []

        async def attempt() -> None:
            session = await pool.open(prompt(GOOD), seed=0, alone=True)
            found.append(len(pool._single))
            await session.close()

        try:
            await asyncio.gather(*(attempt() for _ in range(LONE_PER_WORKER + 3)))
        finally:
            pool.close()
        return max(found)

    assert asyncio.run(most()) == LONE_PER_WORKER


def test_who_waits_for_a_process_of_its_own_learns_that_the_pool_has_ended() -> None:
    async def opened() -> list[Any]:
        pool = SessionPool(setup())
        opening = [pool.open(prompt(GOOD), seed=0, alone=True) for _ in range(LONE_PER_WORKER + 2)]
        found = asyncio.gather(*opening, return_exceptions=True)
        await asyncio.sleep(0)
        pool.close()
        return [*await found, len(pool._single)]

    *failures, left = asyncio.run(opened())
    assert left == 0 and all(isinstance(each, RlframeError | SessionFailed) for each in failures)


def test_a_session_alone_that_is_given_up_while_its_process_starts_takes_that_along() -> None:
    async def run() -> tuple[int, int]:
        before = set(psutil.Process().children())
        pool = SessionPool(setup(step_timeout_s=60.0))
        try:
            opening = asyncio.ensure_future(pool.open(prompt(GOOD), seed=0, alone=True))
            await asyncio.sleep(0)
            begun = set(psutil.Process().children()) - before
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            await pool.open(prompt(GOOD), seed=0)
            return len(begun), sum(process_state(each.pid) is not State.DEAD for each in begun)
        finally:
            pool.close()

    assert asyncio.run(run()) == (2, 1)


def test_a_start_is_tried_from_a_notebook_whose_cells_run_in_a_loop() -> None:
    async def cell() -> None:
        try_start(setup())
        with pytest.raises(CannotStart, match="NoSuchClass"):
            try_start(setup(name=f"{HERE.partition(':')[0]}:NoSuchClass"))

    asyncio.run(cell())
