"""RunnerWorker: the process of the runner. Its event loop has a thread of its own."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ray

from rlframe.attempts.calls import abort_of, calls_of
from rlframe.attempts.dialogue import single_turn
from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.runner import News, Runner, State
from rlframe.attempts.scoring import Judge
from rlframe.attempts.sessions.calls import Setup
from rlframe.attempts.sessions.pool import SessionPool
from rlframe.attempts.turns import Sides, Task, leave
from rlframe.cluster.watch.marks import mark
from rlframe.cluster.worker import Worker
from rlframe.data.config import DataConfig
from rlframe.environments.base import Agent, find_environment, pays_all
from rlframe.environments.config import EnvironmentConfig
from rlframe.rewards.config import RewardConfig
from rlframe.rewards.runner import RewardRunner
from rlframe.rollout.base.config import RolloutConfig
from rlframe.types.packed import Packed
from rlframe.types.rollout import Group, Rollout
from rlframe.types.wait import Wait
from rlframe.utils import outside
from rlframe.utils.process import garbage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframe.attempts.endpoint.agents import Agents
    from rlframe.attempts.endpoint.server import Server
    from rlframe.cluster.profiling.request import Recorder, Request

T = TypeVar("T")
logger = logging.getLogger(__name__)
LOOP = "attempts"
"""Name of the thread of the event loop."""
MARK_S = 1.0
"""Seconds between two looks at what rewards of a whole batch wait for."""
NEWS = "news"
"""Ray's concurrency group of the call that waits for news."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSetup:
    """The settings of a runner."""

    rollout: RolloutConfig
    environment: EnvironmentConfig
    rendering: RenderingConfig
    data: DataConfig
    """Settings with which prompts are rendered."""
    tokenizer: "PreTrainedTokenizerBase"
    """Decodes responses. It is passed as it is, because the library takes seconds to find the class of a folder's."""
    reward: RewardConfig | None
    """The reward functions. None if there are none."""
    seed: int
    """The run's seed."""
    max_calls: int
    """Greatest number of calls that an engine accepts at the same time."""
    max_positions: int
    """Greatest number of tokens of a sequence that engine and trainer take."""
    aside_share: float = 1.0
    """Greatest fraction of the attempts under way that are of tasks aside."""
    end_token_ids: Sequence[int] = ()
    """Tokens at which the engines end a turn."""
    stop_fault: str = ""
    """The reason for which agents must give no stop strings. Empty if they may."""
    folder: str
    """The driver's working folder, to which paths in the configuration are relative."""


class RunnerCalls(Protocol):
    """The calls of a runner's process that the driver uses."""

    def begin(self, setup: RunnerSetup, engines: list[Any]) -> None:
        """Prepares the environment and the reward workers.

        Args:
            engines: the actor of each engine.
        """
        ...

    def start(self, tasks: Packed[Task], version: int) -> None:
        """See Runner.start."""
        ...

    def news(self, wait_s: float) -> News:
        """See Runner.news."""
        ...

    def hurry(self) -> None:
        """See Runner.hurry."""
        ...

    def score(self, groups: list[Group]) -> list[Group]:
        """Returns the groups with their rewards."""
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

    def _recorder(self, request: "Request") -> "Recorder":
        """Returns what samples the stacks of the event loop, in which attempts run."""
        from rlframe.cluster.profiling.stacks import StackRecorder

        return StackRecorder(request, thread=LOOP)

    @staticmethod
    def set_threads(num_threads: int) -> None:
        """Does nothing: the runner computes nothing with torch."""

    def begin(self, setup: RunnerSetup, engines: list[Any]) -> None:
        """See RunnerCalls."""
        os.chdir(setup.folder)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=LOOP, daemon=True).start()
        words, self._max_calls = setup.tokenizer, setup.max_calls
        paid = pays_all(setup.environment)
        self._judge = Judge(RewardRunner(setup.reward, paid=paid), self._loop) if setup.reward else None
        self._sessions: SessionPool | None = None
        self._server: Server | None = None
        self._agents: Agents | None = None

        async def make() -> Runner:
            sides = Sides(
                decode=partial(decoded, words),
                score=self._judge.score if self._judge else _nothing,
                score_group=self._judge.score_group if self._judge else leave,
                waits=self._waits,
                **self._others(setup, words),
            )
            return Runner(
                [calls_of(actor, max_calls=setup.max_calls) for actor in engines],
                sides,
                run_seed=setup.seed,
                max_calls=setup.max_calls,
                max_positions=setup.max_positions,
                attempt_timeout_s=setup.rollout.attempt_timeout_s,
                environment=setup.environment,
                aborts=[abort_of(actor) for actor in engines],
                aside_share=setup.aside_share,
            )

        self._runner = self._in_loop(make())
        logging.getLogger().addHandler(Messenger(self._runner, self._loop))
        # A forked worker has Python's own level, which drops what an environment prints.
        logging.getLogger("rlframe").setLevel(logging.INFO)
        garbage.release()

    def _others(self, setup: RunnerSetup, words: "PreTrainedTokenizerBase") -> dict[str, Any]:
        """Returns what begins dialogues, or runs agents. Starts the processes of sessions, if the environment has
        any."""
        component, settings = find_environment(setup.environment)
        if not component.answers:
            return {"open": single_turn}
        # With transformers, which the runner does without otherwise.
        from rlframe.attempts.rendering.renderer import Renderer
        from rlframe.attempts.sessions.dialogue import Sessions

        self._sessions = SessionPool(
            Setup(environment=setup.environment, folder=setup.folder, sources=dict(outside.SOURCES))
        )
        language = Renderer(words, setup.rendering, data=setup.data, end_token_ids=setup.end_token_ids)
        if issubclass(component, Agent):
            from rlframe.attempts.endpoint.agents import Agents
            from rlframe.attempts.endpoint.server import Server

            # Other machines reach the address only if they reach Ray: it is the loopback's where Ray is alone.
            self._server = Server(ray.util.get_node_ip_address())
            self._agents = Agents(
                pool=self._sessions,
                server=self._server,
                language=language,
                decode=partial(decoded, words),
                config=setup.environment,
                places=asyncio.Semaphore(component.most_at_once(settings) or sys.maxsize),
                stop_fault=setup.stop_fault,
            )
            return {"open": single_turn, "host": self._agents.attempt}
        sessions = Sessions(
            pool=self._sessions,
            language=language,
            decode=partial(decoded, words),
            deterministic=component.deterministic,
        )
        return {"open": sessions.open}

    def _waits(self) -> list[Wait]:
        """Returns what attempts wait for in rewards and agents."""
        return [*(self._judge.waits() if self._judge else []), *(self._agents.waits() if self._agents else [])]

    def start(self, tasks: Packed[Task], version: int) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.start, tasks.objects(), version=version))

    def hurry(self) -> None:
        """See RunnerCalls."""
        self._in_loop(_call(self._runner.hurry))

    @ray.method(concurrency_group=NEWS)
    def news(self, wait_s: float) -> News:
        """See RunnerCalls."""
        if self._sessions:
            for line in self._in_loop(_call(lambda pool: list(pool.printed()), self._sessions)):
                logger.info("the environment printed: %s", line)
        return self._in_loop(self._runner.news(wait_s))

    def score(self, groups: list[Group]) -> list[Group]:
        """See RunnerCalls."""
        work = asyncio.run_coroutine_threadsafe(self._runner.score(groups), self._loop)
        marked_result(work, lambda: self._in_loop(_call(self._waits)), every_s=MARK_S)
        return groups

    def replace(self, engine: int, actor: Any) -> None:
        """See RunnerCalls."""
        ask = calls_of(actor, max_calls=self._max_calls)
        self._in_loop(_call(self._runner.replace, engine, ask, abort_of(actor)))

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
        if self._sessions:
            self._in_loop(_call(self._sessions.close))
        if self._server:
            self._in_loop(self._server.stop())

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


def marked_result(work: Future[T], waits: Callable[[], list[Wait]], *, every_s: float) -> T:
    """Returns the result of `work` when it is done. Marks meanwhile what it waits for, when that changes, so that the
    mark shows progress, and what is missing."""
    said = ""
    while wait([work], timeout=every_s).not_done:
        if (found := "; ".join(each.without_time for each in waits())) and found != said:
            said = found
            mark(f"rewards: {said}")
    return work.result()


def decoded(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    """Returns the text of tokens, special tokens left out."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


async def _call(method: Any, *arguments: Any, **named: Any) -> Any:
    return method(*arguments, **named)


async def _nothing(rollout: Rollout) -> None:
    """Leaves a rollout as it is."""
