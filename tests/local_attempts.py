"""Attempts in this process: the real runner on engines and rewards that are functions, in simulated time."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rlframe.attempts.dialogue import OVER, Answer, Open
from rlframe.attempts.engines import Ask
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.runner import Ended, Runner, State
from rlframe.attempts.turns import Sides, Task
from rlframe.types.rollout import Completion, GenerationRequest, Group, Rollout, SamplingParams, members
from tests.unit.attempts.simulated.clock import FOR_EVER_S, SimulatedLoop


class Observing:
    """A dialogue whose environment is a function of the rollout: the tokens that follow a response, or None."""

    def __init__(self, observe: Callable[[Rollout], Any]):
        self._observe = observe

    async def respond(self, rollout: Rollout) -> Answer:
        found = self._observe(rollout)
        observation = await found if isinstance(found, Awaitable) else found
        return OVER if observation is None else Answer(token_ids=observation)

    async def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def opening(observe: Callable[[Rollout], Any]) -> Open:
    """Returns what begins such dialogues."""

    async def open(rollout: Rollout, **named: Any) -> Observing:
        return Observing(observe)

    return open


class LocalAttempts(Attempts):
    """`asked` has the groups of each start: the prompts' ids, and the seeds' arguments of each."""

    def __init__(
        self,
        asks: list[Ask],
        score: Callable[[Rollout], None],
        *,
        version: int = 0,
        observe: Callable[[Rollout], Any] = lambda rollout: None,
        attempt_timeout_s: float = 1e6,
    ):
        self._open: dict[str, Task] = {}
        self._kept: dict[str, Ended] = {}
        self._events: Counter[str] = Counter()
        self._aside: dict[str, Ended] = {}
        self.num_restarts = 0
        self._paused = False
        self._loop = SimulatedLoop(limit_s=FOR_EVER_S)
        sampling = SamplingParams(max_tokens=4)
        self.rollout: Any = SimpleNamespace(
            role="rollout",
            version=version,
            audit=None,
            abort=lambda: None,
            setup=SimpleNamespace(rollout=SimpleNamespace(sampling=lambda: sampling)),
        )
        self.asked: list[tuple[list[str], set[tuple[int, int]]]] = []

        async def scored(rollout: Rollout) -> None:
            score(rollout)

        sides = Sides(decode=str, open=opening(observe), score=scored)
        self._score = score
        self.runner = Runner(
            asks, sides, run_seed=0, max_calls=1, max_positions=1024, attempt_timeout_s=attempt_timeout_s
        )

    def start(self, tasks: list[Task]) -> None:
        async def begin() -> None:
            self.runner.start(tasks, version=self.rollout.version)

        self._open |= {task.group.id: task for task in tasks}
        self.asked.append(([task.group.prompt.id for task in tasks], {(task.step, task.again) for task in tasks}))
        self._loop.run_until_complete(begin())

    def pause(self) -> tuple[list[Task], list[Ended]]:
        async def interrupt() -> list[Task]:
            self.runner.interrupt()
            await asyncio.sleep(0)
            self.rollout.abort()
            return await self.runner.snapshot()

        self._paused = True
        tasks = self._loop.run_until_complete(interrupt())
        return tasks, self.look(wait_s=0)

    def resume(self) -> None:
        async def release() -> None:
            self.runner.release()

        if self._paused:
            self._paused = False
            self._loop.run_until_complete(release())

    def cancel(self) -> None:
        async def forget() -> None:
            self.runner.cancel()
            await asyncio.sleep(0.01)

        self._paused = False
        self._open.clear()
        self._loop.run_until_complete(forget())

    @contextmanager
    def waiting(self) -> Iterator[Any]:
        yield

    def look(self, *, wait_s: float) -> list[Ended]:
        news = self._loop.run_until_complete(self.runner.news(wait_s))
        self._events += news.events
        if news.failure:
            raise news.failure
        aside = {each.group.id: each for each in news.ended if self._open.pop(each.group.id).aside}
        self._aside |= aside
        return [each for each in news.ended if each.group.id not in aside]

    def finish(self, names: Collection[str]) -> dict[str, Ended]:
        self._loop.call_soon(self.runner.hurry)
        while not set(names) <= self._aside.keys():
            self._kept |= {each.group.id: each for each in self.look(wait_s=1.0)}
        return {name: self._aside.pop(name) for name in names}

    def score(self, groups: list[Group]) -> None:
        for rollout in members(groups):
            self._score(rollout)

    @property
    def now_s(self) -> float:
        """The simulated time."""
        return self._loop.time()

    def state(self) -> State:
        return self.runner.state()

    def metrics(self) -> dict[str, float]:
        return {}


def answering(answer: Callable[[GenerationRequest], Completion]) -> Ask:
    """Returns an engine that answers at once."""

    async def ask(requests: list[GenerationRequest]) -> list[Completion]:
        return [answer(request) for request in requests]

    return ask
