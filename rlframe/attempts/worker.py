"""RunnerWorker: the process of the runner. Its event loop has a thread of its own."""

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayError

from rlframe.attempts.engines import Abort, Ask, EngineLost
from rlframe.attempts.runner import News, Runner, Sides, State, Task
from rlframe.attempts.scoring import Judge
from rlframe.cluster.worker import Worker
from rlframe.environments.base import find_environment
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.rewards.config import RewardConfig
from rlframe.rewards.runner import RewardRunner
from rlframe.rollout.base.config import RolloutConfig
from rlframe.types.rollout import Completion, GenerationRequest, Rollout

T = TypeVar("T")
NEWS = "news"
"""Ray's concurrency group of the call that waits for news."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSetup:
    """The settings of a runner."""

    rollout: RolloutConfig
    model: ModelConfig
    """The model whose tokenizer decodes responses."""
    reward: RewardConfig | None
    """The reward functions. None if there are none."""
    seed: int
    """The run's seed."""
    max_calls: int
    """Greatest number of calls that an engine accepts at the same time."""
    max_positions: int
    """Greatest number of tokens of a sequence."""
    aside_share: float = 1.0
    """Greatest fraction of the attempts under way that are of tasks aside."""
    folder: str
    """The driver's working folder, to which paths in the configuration are relative."""


class RunnerCalls(Protocol):
    """The calls of a runner's process that the driver uses."""

    def begin(self, setup: RunnerSetup, engines: list[Any]) -> None:
        """Prepares the tokenizer, the environment and the reward workers.

        Args:
            engines: the actor of each engine.
        """
        ...

    def start(self, tasks: list[Task], version: int) -> None:
        """See Runner.start."""
        ...

    def news(self, wait_s: float) -> News:
        """See Runner.news."""
        ...

    def hurry(self) -> None:
        """See Runner.hurry."""
        ...

    def score(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Returns the rollouts with their rewards."""
        ...

    def replace(self, engine: int, actor: Any) -> None:
        """See Runner.replace."""
        ...

    def state(self) -> State:
        """See Runner.state."""
        ...

    def interrupt(self) -> None:
        """See Runner.interrupt."""
        ...

    def snapshot(self) -> list[Task]:
        """See Runner.snapshot."""
        ...

    def hold(self) -> None:
        """See Runner.hold."""
        ...

    def release(self) -> None:
        """See Runner.release."""
        ...

    def cancel(self) -> None:
        """See Runner.cancel."""
        ...

    def close(self) -> None:
        """Ends the reward workers."""
        ...


class RunnerWorker(Worker, RunnerCalls):
    """Passes calls on to the runner."""

    _runner: Runner

    @staticmethod
    def set_threads(num_threads: int) -> None:
        """Does nothing: the runner computes nothing with torch."""

    def begin(self, setup: RunnerSetup, engines: list[Any]) -> None:
        """See RunnerCalls."""
        os.chdir(setup.folder)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="attempts", daemon=True).start()
        words = tokenizer.load(resolve(setup.model))
        environment, settings = find_environment(setup.rollout)
        self._judge = Judge(RewardRunner(setup.reward), self._loop) if setup.reward else None
        sides = Sides(
            decode=lambda token_ids: str(words.decode(token_ids, skip_special_tokens=True)),
            observe=environment(settings).respond,
            score=self._judge.score if self._judge else _nothing,
        )

        async def make() -> Runner:
            return Runner(
                [calls_of(actor) for actor in engines],
                sides,
                run_seed=setup.seed,
                max_calls=setup.max_calls,
                max_positions=setup.max_positions,
                attempt_timeout_s=setup.rollout.attempt_timeout_s,
                aborts=[abort_of(actor) for actor in engines],
                aside_share=setup.aside_share,
            )

        self._runner = self._in_loop(make())
        logging.getLogger().addHandler(Messenger(self._runner, self._loop))

    def start(self, tasks: list[Task], version: int) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.start, tasks, version=version))

    def hurry(self) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.hurry))

    @ray.method(concurrency_group=NEWS)
    def news(self, wait_s: float) -> News:
        """See RunnerCalls."""
        return self._in_loop(self._runner.news(wait_s))

    def score(self, rollouts: list[Rollout]) -> list[Rollout]:
        """See RunnerCalls."""
        self._in_loop(self._runner.score(rollouts))
        return rollouts

    def replace(self, engine: int, actor: Any) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.replace, engine, calls_of(actor), abort_of(actor)))

    def state(self) -> State:
        """See RunnerCalls."""
        return self._in_loop(_call(self._runner.state))

    def interrupt(self) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.interrupt))

    def snapshot(self) -> list[Task]:
        """See RunnerCalls."""
        return self._in_loop(self._runner.snapshot())

    def hold(self) -> None:
        """See RunnerCalls."""
        self._in_loop(self._runner.hold())

    def release(self) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.release))

    def cancel(self) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.cancel))

    def close(self) -> None:
        """See RunnerCalls."""
        if self._judge:
            self._judge.close()

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Messenger(logging.Handler):
    """Passes messages of this process on to the driver, whose log people read."""

    def __init__(self, runner: Runner, loop: asyncio.AbstractEventLoop):
        super().__init__(logging.INFO)
        self._runner, self._loop = runner, loop

    def emit(self, record: logging.LogRecord) -> None:
        """Passes a message of rlframe on."""
        if record.name.startswith("rlframe"):
            self._loop.call_soon_threadsafe(self._runner.warn, record.levelno, record.getMessage())


def calls_of(actor: Any) -> Ask:
    """Returns the function that sends requests to an engine's actor."""

    async def ask(requests: list[GenerationRequest]) -> list[Completion]:
        call = actor.generate.remote(requests)
        try:
            return await asyncio.wrap_future(call.future())
        except RayError:
            raise EngineLost([call]) from None

    return ask


def abort_of(actor: Any) -> Abort:
    """Returns the function that makes an engine's actor abort requests. It does not wait, and an engine that is dead
    has nothing to abort."""

    def abort(names: list[str]) -> None:
        actor.abort.remote(names)

    return abort


async def _call(method: Any, *arguments: Any, **named: Any) -> Any:
    return method(*arguments, **named)


async def _nothing(rollout: Rollout) -> None:
    """Leaves a rollout as it is."""
