"""Simulated processes: engines and the runner's process with the real runner in it, which die at any moment, and the
calls between them and the driver."""

import asyncio
import math
import pickle
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from rlframe.attempts.engines import Abort, Ask, EngineLost
from rlframe.attempts.runner import News, Runner, State
from rlframe.attempts.turns import Sides, Task
from rlframe.cluster.watch.activities import Activity
from rlframe.types.packed import Packed
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout
from rlframe.utils.errors import RlframeError, WorkerDied
from tests.local_attempts import opening
from tests.unit.attempts.simulated.clock import SimulatedLoop
from tests.unit.attempts.simulated.settings import Settings

OBSERVATION = [3, 1]
"""Tokens with which the environment asks for another turn."""


def copied(value: Any) -> Any:
    """Returns what arrives in another process."""
    return pickle.loads(pickle.dumps(value))


class Process:
    """Answers calls until it dies. Calls that are under way then fail, and so do later ones."""

    def __init__(self, loop: SimulatedLoop):
        self.loop, self.alive = loop, True
        self.order = asyncio.Lock()
        """Held by the call that has its turn."""
        self._calls: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}

    def call(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "asyncio.Future[Any]":
        """Starts `work` and returns its answer."""
        answer: asyncio.Future[Any] = self.loop.create_future()
        if not self.alive:
            answer.set_exception(RayActorError())
        else:
            self._calls[answer] = self.loop.create_task(self._answer(work, answer))
        # The caller may be dead.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return answer

    async def _answer(self, work: Callable[[], Coroutine[Any, Any, Any]], answer: "asyncio.Future[Any]") -> None:
        try:
            result = await work()
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(result)
        finally:
            self._calls.pop(answer, None)

    def kill(self) -> None:
        """Ends the process."""
        self.alive = False
        for answer, task in list(self._calls.items()):
            task.cancel()
            if not answer.done():
                answer.set_exception(RayActorError())


def response_to(seed: int) -> list[int]:
    """Returns the tokens that every engine answers to a request with this seed."""
    return [4 + (seed >> shift) % 90 for shift in range(1 + seed % 7)]


class Engine(Process):
    """Samples tokens one after the other, each by the version that it holds at that moment."""

    def __init__(
        self, loop: SimulatedLoop, settings: Settings, rng: Random, *, version: int, sleeps: Callable[[], bool]
    ):
        super().__init__(loop)
        self._settings, self._rng, self._sleeps = settings, rng, sleeps
        self._since: list[float] = [loop.time()]
        self._versions = [version]
        self._aborts: dict[str, asyncio.Event] = {}
        """Those of the running requests, by name."""

    @property
    def is_busy(self) -> bool:
        """Returns whether a request is running."""
        return bool(self._aborts)

    def commit(self, version: int) -> None:
        """Changes the weights."""
        self._since.append(self.loop.time())
        self._versions.append(version)

    def abort(self, names: Collection[str] | None = None) -> None:
        """Ends requests at once, or all of them."""
        for name in list(self._aborts) if names is None else names:
            if name in self._aborts:
                self._aborts[name].set()

    async def abort_some(self, names: list[str]) -> None:
        """Ends requests when the call arrives."""
        await asyncio.sleep(self._rng.random() * 0.02)
        self.abort(names)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Returns the responses when all are there."""
        assert not self._sleeps(), "engines that sleep are asked for nothing"
        return list(await asyncio.gather(*map(self._respond, requests)))

    async def _respond(self, request: GenerationRequest) -> Completion:
        tokens, begun, aborted = response_to(request.seed), self.loop.time(), asyncio.Event()
        assert request.name and request.name not in self._aborts, "a running request has a name of its own"
        self._aborts[request.name] = aborted
        assert tokens[: request.first_position] == request.begun, "an interrupted response goes on as it began"
        tokens = tokens[request.first_position :]
        each_s = 0.0 if self._settings.plain else min(0.1 * self._rng.paretovariate(1.2), 15.0)
        why = FinishReason.STOP
        try:
            async with asyncio.timeout(each_s * len(tokens)):
                await aborted.wait()
            tokens, why = tokens[: min(int((self.loop.time() - begun) / each_s), len(tokens) - 1)], FinishReason.ABORT
        except TimeoutError:
            pass
        finally:
            del self._aborts[request.name]
        places = [bisect_right(self._since, begun + each_s * index) - 1 for index in range(len(tokens))]
        versions = [self._versions[max(place, 0)] for place in places]
        return Completion(token_ids=tokens, logprobs=np.zeros(len(tokens)), versions=versions, finish_reason=why)


def ask_of(engine: Engine) -> Ask:
    """Returns the function that sends requests to an engine."""

    async def ask(requests: list[GenerationRequest]) -> list[Completion]:
        sent = copied(requests)
        call = engine.call(lambda: engine.generate(sent))
        try:
            return copied(await call)
        except RayActorError:
            raise EngineLost([call]) from None

    return ask


def abort_of(engine: Engine) -> Abort:
    """Returns the function that makes an engine end requests."""

    def abort(names: list[str]) -> None:
        engine.call(lambda: engine.abort_some(names))

    return abort


def chance(rollout: Rollout, what: str) -> float:
    """Returns a number in [0, 1) that depends on the tokens of an attempt only."""
    return zlib.crc32(what.encode() + rollout.token_ids.tobytes()) / 2**32


class Sideshow:
    """The environment and the rewards. What they answer depends on the tokens, when they do so on luck."""

    def __init__(self, settings: Settings, rng: Random):
        self._settings, self._rng = settings, rng

    def observe(self, rollout: Rollout) -> list[int] | None:
        """Asks for another turn, ends the attempt, or raises."""
        if chance(rollout, "raises") < self._settings.raises:
            raise KeyError("the tool is broken")
        again = len(rollout.spans) and (~rollout.loss_mask).sum() == len(rollout.prompt.input)
        return OBSERVATION if again and chance(rollout, "turns") < 0.3 else None

    async def score(self, rollout: Rollout) -> None:
        """Scores at some time. A reward that fails counts as 0."""
        if not self._settings.plain:
            stuck = self._settings.deadline and self._rng.random() < 0.01
            await asyncio.sleep(1e5 if stuck else self._rng.expovariate(2.0))
        rollout.reward_failed = chance(rollout, "fails") < 0.05
        easy = zlib.crc32(rollout.prompt.id.encode()) % 6 == 0
        value = 1.0 if easy else int(chance(rollout, "reward") * 5) / 4
        rollout.reward = 0.0 if rollout.reward_failed else value


class RunnerProcess(Process):
    """The real runner in a process that may die."""

    def __init__(self, loop: SimulatedLoop, settings: Settings, rng: Random):
        super().__init__(loop)
        self._settings, self._sideshow = settings, Sideshow(settings, rng)
        self.runner: Runner

    def kill(self) -> None:
        super().kill()
        if hasattr(self, "runner"):
            self.runner.cancel()

    async def begin(self, setup: Any, engines: list[Engine]) -> None:
        self.runner = Runner(
            [ask_of(engine) for engine in engines],
            Sides(decode=str, open=opening(self._sideshow.observe), score=self._sideshow.score),
            run_seed=0,
            max_calls=self._settings.max_calls,
            max_positions=1024,
            attempt_timeout_s=self._settings.deadline or 1e9,
            aborts=[abort_of(engine) for engine in engines],
            aside_share=self._settings.aside_share,
        )

    async def hurry(self) -> None:
        self.runner.hurry()

    async def start(self, tasks: Packed[Task], version: int) -> None:
        self.runner.start(tasks.objects(), version=version)

    async def news(self, wait_s: float) -> News:
        return await self.runner.news(wait_s)

    async def score(self, groups: list[Group]) -> list[Group]:
        await self.runner.score(groups)
        return groups

    async def replace(self, engine: int, actor: Engine) -> None:
        self.runner.replace(engine, ask_of(actor), abort_of(actor))

    async def interrupt(self) -> None:
        self.runner.interrupt()

    async def state(self) -> State:
        return self.runner.state()

    async def snapshot(self) -> list[Task]:
        return copied(await self.runner.snapshot())

    async def hold(self) -> None:
        await self.runner.hold()

    async def release(self) -> None:
        self.runner.release()

    async def cancel(self) -> None:
        self.runner.cancel()


class Workers:
    """Does what a WorkerGroup does, for simulated processes."""

    start_timeout_s = call_timeout_s = 1e6

    def __init__(self, actors: Iterable[Any], until: Callable[[Any], Any], rng: Random, make: Callable[[], Any]):
        """
        Args:
            until: runs the simulation until a future is done, and returns its result.
            make: returns a new process.
        """
        self.actors = list(actors)
        self._until, self._rng, self._make = until, rng, make

    def ask(self, rank: int, method: Any, *arguments: Any) -> "asyncio.Future[Any]":
        process, name = self.actors[rank], method.__name__
        sent = copied(arguments) if name in ("start", "score") else arguments

        async def work() -> Any:
            # Calls come in order; the one that waits for news has a thread of its own.
            async with nullcontext() if name == "news" else process.order:
                await asyncio.sleep(self._rng.random() * 0.02)
                result = await getattr(process, name)(*sent)
            if isinstance(result, News):
                result.ended = copied(result.ended)
            # The process may die with the answer on its way.
            await asyncio.sleep(self._rng.random() * 0.02)
            return result

        return process.call(work)

    def wait(self, calls: Sequence[Any], *, doing: str, timeout_s: float | None = None) -> list[Any]:
        results = []
        for rank, call in enumerate(calls):
            try:
                results.append(self._until(call))
            except RayActorError as error:
                raise self.failure(error, rank, doing) from None
        return results

    def settle(self, calls: Sequence[Any], *, timeout_s: float) -> bool:
        self._until(asyncio.wait(calls, timeout=timeout_s))
        return all(call.done() for call in calls)

    def some(self, calls: Sequence[Any], activity: Any) -> tuple[list[Any], list[Any]]:
        self._until(asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED))
        return [call for call in calls if call.done()], [call for call in calls if not call.done()]

    def answer(self, call: Any, activity: Any) -> Any:
        return call.result()

    def failure(self, error: Exception, rank: int, doing: str) -> RlframeError:
        return WorkerDied(f"rank {rank} died in {doing}: {error!r:.40}")

    def deaths(self) -> list[WorkerDied]:
        return [WorkerDied("a rank died") for actor in self.actors if not actor.alive]

    def replace(self, rank: int) -> None:
        self.actors[rank].kill()
        self.actors[rank] = self._make()

    @contextmanager
    def waiting(self, doing: str) -> Iterator[Activity]:
        yield Activity(name=doing, limit_s=math.inf, setting="")

    def note_pending(self, activity: Any, ranks: Iterable[int]) -> None:
        pass
