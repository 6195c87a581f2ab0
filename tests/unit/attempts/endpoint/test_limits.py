"""Limits of agents, in simulated time: which one of them ends an attempt, and on whose account."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.attempts.endpoint import desk
from rlframe.attempts.endpoint.agents import Agents
from rlframe.attempts.endpoint.asked import Asked, Refused
from rlframe.attempts.endpoint.desk import Desk
from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.attempts.sessions.calls import SessionFailed, Trouble
from rlframe.attempts.turns import Hosted, Task
from rlframe.data.config import DataConfig
from rlframe.environments.base import Endpoint, Step
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, SamplingParams
from tests.unit.attempts.endpoint.bench import END, QUESTION, Scripted, load_words
from tests.unit.attempts.simulated.clock import simulated

LIMIT_S = 60.0
Look = Callable[[Desk, int], Awaitable[Step | None]]


class Sessions:
    """A pool of one session and a server of one endpoint, without processes and sockets."""

    def __init__(self, look: Look, *, opens_s: float, closes: bool):
        self._look, self._opens_s, self._looks, self._closes = look, opens_s, 0, closes

    async def open(self, first: Any, *, seed: int, alone: bool | None = None) -> Any:
        if isinstance(first, Desk):
            self._desk = first
            return 1, Endpoint(url="http://127.0.0.1:1/v1", key="", seed=seed)
        await asyncio.sleep(self._opens_s)
        return self

    async def run(self, endpoint: Endpoint) -> None:
        pass

    async def look(self, *, wait_s: float) -> Step | None:
        await asyncio.sleep(wait_s)
        self._looks += 1
        return await self._look(self._desk, self._looks)

    async def close(self) -> None:
        if not self._closes:
            raise SessionFailed(Trouble.RAISED, "it cannot be closed")

    def abandon(self) -> None:
        pass


def ask(**settings: Any) -> Asked:
    fields = {"messages": [QUESTION], "tools": [], "max_tokens": None, "stop": (), "stream": False, "model": ""}
    return Asked(**{**fields, **settings})


def hosted_by(engine: Scripted, events: list[str]) -> Hosted:
    """An attempt whose responses `engine` gives, and whose events are counted."""
    prompt = Prompt(id="p", messages=(QUESTION,), text="", input=ModelInput((1, 2)))
    task = Task(group=Group.begin("0", prompt, 1), sampling=SamplingParams(max_tokens=20), step=1).begun()
    ((rollout, progress),) = task.pairs()
    return Hosted(
        task=task,
        rollout=rollout,
        progress=progress,
        sample=engine.sample,
        seed=lambda turn: 0,
        most=100,
        count=events.append,
    )


def answered_yes() -> Hosted:
    """An attempt whose every response is yes."""
    return hosted_by(Scripted(load_words(), lambda before: "yes" + END), [])


def judged(
    look: Look,
    monkeypatch: pytest.MonkeyPatch,
    *,
    opens_s: float = 0.0,
    closes: bool = True,
    hosted: Hosted | None = None,
) -> Verdict:
    """The verdict on an attempt whose agent does at each look of its process what `look` does."""
    words = load_words()
    hosted = hosted or answered_yes()

    async def run() -> Verdict:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(desk, "time", SimpleNamespace(monotonic=loop.time, time=loop.time))
        sessions: Any = Sessions(look, opens_s=opens_s, closes=closes)
        server: Any = SimpleNamespace(open=sessions.open, close=lambda number: None)
        agents = Agents(
            pool=sessions,
            server=server,
            language=Renderer(words, RenderingConfig(), data=DataConfig()),
            decode=str,
            config=EnvironmentConfig(name="endpoint", step_timeout_s=LIMIT_S),
            places=asyncio.Semaphore(1),
        )
        return await agents.attempt(hosted)

    return simulated(run())


def test_the_time_in_which_a_session_begins_is_not_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(desk: Desk, looks: int) -> Step | None:
        if looks < 3:
            return None
        await desk.answer(ask())
        return Step(done=True, reward=1.0)

    assert judged(look, monkeypatch, opens_s=2 * LIMIT_S) is Verdict.TRAIN


def test_an_agent_that_is_without_a_call_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(desk: Desk, looks: int) -> Step | None:
        return None

    with pytest.raises(SessionFailed) as caught:
        judged(look, monkeypatch)
    assert caught.value.trouble is Trouble.TOOK_TOO_LONG


@pytest.mark.parametrize("trouble", [Trouble.NEIGHBOUR, Trouble.RAISED])
def test_a_refused_call_is_no_reason_for_the_end_of_a_process(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that fails after a limit has met the limit. One whose process ends under it has done nothing."""

    async def look(desk: Desk, looks: int) -> Step | None:
        await desk.answer(ask())
        with pytest.raises(Refused, match="at most 100 tokens"):
            await desk.answer(ask(messages=[{"role": "user", "content": "x" * 100}]))
        raise SessionFailed(trouble, "its process was ended")

    if trouble is Trouble.RAISED:
        assert judged(look, monkeypatch) is Verdict.TRAIN
        return
    with pytest.raises(SessionFailed) as caught:
        judged(look, monkeypatch)
    assert caught.value.trouble is Trouble.NEIGHBOUR


def test_what_an_agent_has_earned_after_a_limit_does_not_become_nothing_at_its_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(desk: Desk, looks: int) -> Step | None:
        await desk.answer(ask())
        with pytest.raises(Refused, match="at most 100 tokens"):
            await desk.answer(ask(messages=[{"role": "user", "content": "x" * 100}]))
        return Step(done=True, reward=1.0)

    with pytest.raises(SessionFailed, match="it cannot be closed"):
        judged(look, monkeypatch, closes=False)


def test_what_an_agent_has_earned_is_kept_where_it_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """environment.on_failure=train judges the attempt."""

    async def look(desk: Desk, looks: int) -> Step | None:
        await desk.answer(ask())
        return Step(done=True, reward=2.0, metrics={"score": 3.0})

    hosted = answered_yes()
    with pytest.raises(SessionFailed, match="it cannot be closed"):
        judged(look, monkeypatch, closes=False, hosted=hosted)
    assert hosted.rollout.records[-1].reward == 2.0 and hosted.rollout.numbers == {"score": 3.0}
    assert hosted.rollout.token_rewards is not None and hosted.rollout.token_rewards.sum() == 2.0


@pytest.mark.parametrize("ends", [False, True])
def test_a_response_that_nobody_waits_for_any_more_is_in_no_sequence(ends: bool) -> None:
    """Also if the agent goes away, or ends, in the turn of the event loop in which the engine has answered."""
    words, events, moments = load_words(), [], 1

    async def after(turns: int) -> bool:
        hosted = hosted_by(Scripted(words, lambda before: "yes" + END), events)
        desk = Desk(hosted, Renderer(words, RenderingConfig(), data=DataConfig()), str, max_calls=9)
        call = asyncio.create_task(desk.answer(ask()))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_answered = call.done()
        (desk.close if ends else call.cancel)()
        await asyncio.gather(call, return_exceptions=True)
        if not ends:
            desk.close()
        assert bool(hosted.rollout.turns) == was_answered, turns
        return was_answered

    while not simulated(after(moments)):
        moments += 1
    assert events == ([] if ends else ["calls_lost"] * (moments - 1)) and moments > 2


def test_stop_strings_are_refused_where_the_engine_would_leave_out_what_is_trained_with() -> None:
    words, events = load_words(), []
    hosted = hosted_by(Scripted(words, lambda before: "yes" + END), events)

    async def run() -> str:
        language = Renderer(words, RenderingConfig(), data=DataConfig())
        desk = Desk(hosted, language, str, max_calls=9, stop_fault="no routed experts")
        with pytest.raises(Refused, match="stop is not supported in this run: no routed experts") as caught:
            await desk.answer(ask(stop=("x",)))
        assert (caught.value.status, caught.value.parameter) == (400, "stop")
        return (await desk.answer(ask())).content

    assert simulated(run()) == "yes" and events == ["calls_refused"]
