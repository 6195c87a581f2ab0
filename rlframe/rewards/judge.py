"""Judge: scores rollouts in parallel processes. A reward that hangs, raises or crashes is one failed sample.

Why not a library's process pool: their spawned workers import the parent's main module again, and with it torch, ray
and megatron; and they report a chunk at a time, so that one hang cannot be told from its neighbours. Here a worker is a
bare interpreter that knows only the rewards, and it reports every task.
"""

import logging
import math
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from rlframe.rewards.base import Attempt, build_reward
from rlframe.rewards.config import RewardConfig
from rlframe.types.rollout import Rollout
from rlframe.utils.errors import ConfigError, RewardError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
LARGEST_CHUNK = 64

Task = tuple[int, str]
"""Index of the rollout, and the part."""


class Judge:
    """Fills the rewards of rollouts. Close it, or use it as a context manager."""

    def __init__(self, config: RewardConfig):
        """Builds every reward once here, to fail early, and starts the workers without waiting for them.

        Raises:
            ConfigError: no parts, an unknown reward or option.
            RewardError: a user's function that cannot be imported.
        """
        if not config.parts:
            raise ConfigError(["reward.parts must name at least one reward, got none"])
        for key, part in config.parts.items():
            build_reward(part, key=f"reward.parts.{key}")
        self._config = config
        self.failures: dict[str, int] = dict.fromkeys(config.parts, 0)
        """Failed samples of the last `score`, by part."""
        self._workers = [_Worker(config) for _ in range(config.workers)]
        self._failed_starts = 0
        """Workers that died while they started, one after the other."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. The judge cannot be used afterwards."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, rollouts: list[Rollout]) -> None:
        """Fills `reward`, `reward_parts` and `reward_failed` of each rollout, and `failures`.

        Raises:
            RewardError: workers cannot be started. A reward that fails on a rollout never raises.
        """
        assert self._workers, "this judge is closed"
        try:
            results = self._run([_attempt(rollout) for rollout in rollouts])
        except BaseException:
            # Workers may still hold tasks of this call; their answers must not be taken for those of another.
            self.close()
            raise
        parts = self._config.parts
        self.failures = dict.fromkeys(parts, 0)
        for index, rollout in enumerate(rollouts):
            outcomes = {key: results[index, key] for key in parts}
            for key, outcome in outcomes.items():
                if isinstance(outcome, str):
                    self.failures[key] += 1
                    if self.failures[key] == 1:
                        logger.warning("reward.parts.%s failed on prompt %s: %s", key, rollout.prompt.id, outcome)
            rollout.reward_parts = {
                key: 0.0 if isinstance(outcome, str) else outcome for key, outcome in outcomes.items()
            }
            rollout.reward = sum(parts[key].weight * value for key, value in rollout.reward_parts.items())
            rollout.reward_failed = any(isinstance(outcome, str) for outcome in outcomes.values())

    def _run(self, attempts: list[Attempt]) -> dict[Task, float | str]:
        tasks = [(index, key) for index in range(len(attempts)) for key in self._config.parts]
        size = min(LARGEST_CHUNK, math.ceil(len(tasks) / (4 * len(self._workers))))
        chunks = deque(tasks[start : start + size] for start in range(0, len(tasks), size or 1))
        results: dict[Task, float | str] = {}
        while len(results) < len(tasks):
            for worker in self._workers:
                if worker.is_idle and chunks:
                    worker.assign(chunks.popleft(), attempts)
            wait_s = max(0.0, min(worker.deadline for worker in self._workers) - time.monotonic())
            connections = [worker.connection for worker in self._workers]
            ready = multiprocessing.connection.wait(connections, None if math.isinf(wait_s) else wait_s)
            for number, worker in enumerate(self._workers):
                if worker.connection in ready:
                    trouble = worker.receive(results)
                elif time.monotonic() > worker.deadline:
                    trouble = f"took longer than {self._config.timeout_s} s"
                else:
                    continue
                if trouble:
                    worker.kill()
                    self._check_start(worker, trouble)
                    chunks.extendleft(worker.give_up(trouble, results))
                    self._workers[number] = _Worker(self._config)
        self._failed_starts = 0
        return results

    def _check_start(self, worker: "_Worker", trouble: str) -> None:
        """One worker may be killed while it starts, for memory, say; more of them in a row mean that none can start."""
        if worker.is_starting:
            self._failed_starts += 1
            if self._failed_starts > len(self._workers):
                raise RewardError(f"reward workers cannot start: the last one {trouble}")


class _Worker:
    """One process, and what it has been given to do."""

    def __init__(self, config: RewardConfig):
        self._timeout_s = config.timeout_s
        self.connection, theirs = multiprocessing.Pipe()
        # A session of its own: Ctrl-C does not reach it, and what a reward starts is killed with it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlframe.rewards._worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.connection.send(config)
        self._started = False
        self._tasks: deque[Task] = deque()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        """Monotonic time by which the next message must come."""

    @property
    def is_idle(self) -> bool:
        return self._started and not self._tasks

    @property
    def is_starting(self) -> bool:
        return not self._started and not self._tasks

    def assign(self, tasks: list[Task], attempts: list[Attempt]) -> None:
        """Sends a chunk. Pickle writes an attempt once, however many parts it is judged by."""
        self._tasks.extend(tasks)
        self.deadline = time.monotonic() + self._timeout_s
        try:
            self.connection.send([(attempts[index], key) for index, key in tasks])
        except OSError:
            # It died while idle: `receive` sees that next. No task of this chunk has begun, so none is to blame.
            self._started = False

    def receive(self, results: dict[Task, float | str]) -> str | None:
        """Takes the next message; returns what is wrong when the process is gone."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return f"ended its process (exit code {self._process.wait()})"
        if self._started:
            results[self._tasks.popleft()] = message
        elif message is not None:
            raise RewardError(f"a reward worker cannot start: {message}")
        self._started = True
        self.deadline = time.monotonic() + self._timeout_s if self._tasks else math.inf
        return None

    def give_up(self, trouble: str, results: dict[Task, float | str]) -> list[list[Task]]:
        """Blames the task in hand, if one was begun, and hands the others back."""
        if self._started and self._tasks:
            results[self._tasks.popleft()] = trouble
        return [list(self._tasks)] if self._tasks else []

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self.connection.close()


def _attempt(rollout: Rollout) -> Attempt:
    return Attempt(
        prompt_text=rollout.prompt.text,
        response_text=rollout.text,
        answer=rollout.prompt.answer,
        num_response_tokens=sum(rollout.loss_mask),
        finish_reason=rollout.finish_reason,
        fields=rollout.prompt.fields,
        source=rollout.prompt.source,
    )
