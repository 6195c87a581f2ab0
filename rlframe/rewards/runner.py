"""The reward runner: scores rollouts in parallel processes.

A reward that hangs, raises or crashes is one failed sample.

It is not a library's process pool, because spawned workers of a pool import the parent's main module, and with it
torch, ray and megatron. They also report a chunk at a time, so that a hang cannot be attributed to one task. Here a
worker is a bare interpreter that imports only the rewards, and it reports every task.
"""

import logging
import math
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rlframe.rewards._process import START_TIMEOUT_S, Outcome, Process, Task
from rlframe.rewards.base import Attempt, part_faults
from rlframe.rewards.config import RewardConfig
from rlframe.types.rollout import Rollout, weighted_sum
from rlframe.utils.errors import ConfigError, RewardError
from rlframe.utils.faults import Fault

logger = logging.getLogger(__name__)

LARGEST_CHUNK = 64
MOST_PRINTED_LINES, MOST_PRINTED_CHARACTERS = 20, 200
"""Limits of what is logged of the rewards' output: the last lines of each worker after each call, truncated."""
TRIED_AT_LEAST = 64
"""Number of rollouts after which a part that has never given a score ends the run."""


class RewardRunner:
    """Scores rollouts. Must be closed, or used as a context manager."""

    def __init__(self, config: RewardConfig):
        """Starts the workers without waiting for them.

        Raises:
            ConfigError: no parts, an unknown reward or option.
        """
        if not config.parts:
            raise ConfigError([Fault("reward.parts", "must name at least one reward", got="none")])
        if faults := [
            fault for key, part in config.parts.items() for fault in part_faults(part, f"reward.parts.{key}")
        ]:
            raise ConfigError(faults)
        self._config = config
        self.failures: dict[str, int] = dict.fromkeys(config.parts, 0)
        """Failed samples of the last `score`, by part."""
        self._tried = dict.fromkeys(config.parts, 0)
        """Number of rollouts by part, for parts that have never given a score; see TRIED_AT_LEAST."""
        self._workers = [Process(config) for _ in range(config.workers)]
        self._failed_starts = 0
        """Number of consecutive workers that died while they started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. The runner cannot be used afterwards."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, rollouts: list[Rollout]) -> None:
        """Fills `reward`, `reward_parts` and `reward_failed` of each rollout, and `failures`.

        Raises:
            RewardError: workers cannot be started. A reward that fails on a rollout never raises.
        """
        assert self._workers, "this runner is closed"
        try:
            results = self._run([_attempt(rollout) for rollout in rollouts])
        except BaseException:
            # Workers may still hold tasks of this call; their answers must not be mistaken for those of another call.
            self.close()
            raise
        self._tell_printed()
        self.failures = dict.fromkeys(self._config.parts, 0)
        for index, rollout in enumerate(rollouts):
            self._fill(rollout, {key: results[index, key] for key in self._config.parts})
        self._refuse_what_never_scores(rollouts, results)

    def _fill(self, rollout: Rollout, outcomes: Mapping[str, Outcome]) -> None:
        """Writes the parts' scores into the rollout. A failed part counts as 0; a part that gave None is left out."""
        failed = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, str)}
        for key, why in failed.items():
            self.failures[key] += 1
            if self.failures[key] == 1:
                logger.warning("reward.parts.%s failed on prompt %s: %s", key, rollout.prompt.id, why)
        rollout.reward_parts = {
            key: 0.0 if isinstance(outcome, str) else outcome
            for key, outcome in outcomes.items()
            if outcome is not None
        }
        weights = {key: part.weight for key, part in self._config.parts.items()}
        rollout.reward_weights = weights
        rollout.reward = weighted_sum(rollout.reward_parts, weights)
        rollout.reward_failed = bool(failed)

    def _refuse_what_never_scores(self, rollouts: list[Rollout], results: Mapping[Task, Outcome]) -> None:
        """Ends a run whose reward cannot work, instead of training on zeros.

        Raises:
            RewardError: a part has failed on every rollout since the run began, and they are TRIED_AT_LEAST or more.
        """
        for key in list(self._tried):
            if self.failures[key] < len(rollouts):
                del self._tried[key]
                continue
            self._tried[key] += len(rollouts)
            if self._tried[key] >= TRIED_AT_LEAST:
                raise RewardError(
                    f"reward.parts.{key} has failed on each of the first {self._tried[key]} rollouts, so "
                    f"nothing can be learned from it: {results[0, key]}"
                )

    def _run(self, attempts: list[Attempt]) -> dict[Task, Outcome]:
        tasks = [(index, key) for index in range(len(attempts)) for key in self._config.parts]
        size = min(LARGEST_CHUNK, math.ceil(len(tasks) / (4 * len(self._workers))))
        chunks = deque(tasks[start : start + size] for start in range(0, len(tasks), size or 1))
        results: dict[Task, Outcome] = {}
        while len(results) < len(tasks):
            for worker in self._workers:
                worker.expect_start()
                if worker.is_idle and chunks:
                    worker.assign(chunks.popleft(), attempts)
            ready = wait(self._workers)
            for number, worker in enumerate(self._workers):
                if ready & set(worker.writable):
                    worker.send()
                trouble = worker.take(results) if ready & set(worker.readable) else None
                if not trouble and time.monotonic() > worker.deadline:
                    trouble = f"took longer than {self._config.timeout_s} s"
                if trouble:
                    self._replace(number, trouble, chunks, results)
        self._failed_starts = 0
        return results

    def _replace(self, number: int, trouble: str, chunks: deque[list[Task]], results: dict[Task, Outcome]) -> None:
        """Ends a worker in trouble, passes on the tasks it did not begin, and starts another one."""
        worker = self._workers[number]
        printed = worker.printed()
        worker.kill()
        if worker.is_starting:
            self._count_failed_start(trouble, printed)
        if rest := worker.give_up(trouble, results):
            chunks.appendleft(rest)
        self._workers[number] = Process(self._config)

    def _count_failed_start(self, trouble: str, printed: str) -> None:
        """Counts consecutive workers that failed to start. One may be killed while it starts, for example for memory;
        several in a row mean that none can start."""
        self._failed_starts += 1
        if self._failed_starts > len(self._workers):
            raise RewardError(f"reward workers cannot start: the last one {trouble}{last_line(printed)}")

    def _tell_printed(self) -> None:
        """Logs the end of the rewards' output."""
        for worker in self._workers:
            for line in worker.printed().splitlines()[-MOST_PRINTED_LINES:]:
                logger.info("a reward printed: %s", line[:MOST_PRINTED_CHARACTERS])


def try_start(config: RewardConfig) -> None:
    """Starts one worker with the rewards of `config`, and ends it again.

    Raises:
        RewardError: the worker does not start; the message gives the reason.
    """
    worker, results = Process(config), {}
    try:
        worker.send()
        worker.expect_start()
        while worker.is_starting:
            trouble = worker.take(results) if wait([worker]) & set(worker.readable) else None
            if not trouble and time.monotonic() > worker.deadline:
                trouble = f"was not ready within {START_TIMEOUT_S:g} s"
            if trouble:
                raise RewardError(f"a reward worker cannot start: it {trouble}{last_line(worker.printed())}")
    finally:
        worker.kill()


def wait(workers: Sequence[Process]) -> set[int]:
    """Returns the descriptors of `workers` that are ready. Waits for one, or until the first deadline."""
    poll = select.poll()
    for worker in workers:
        for descriptor in worker.readable:
            poll.register(descriptor, select.POLLIN)
        for descriptor in worker.writable:
            poll.register(descriptor, select.POLLOUT)
    left_s = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
    assert math.isfinite(left_s), "a worker is busy or starting"
    return {descriptor for descriptor, _ in poll.poll(math.ceil(left_s * 1000))}


def last_line(printed: str) -> str:
    """Returns the last line that a worker printed, as the end of a sentence."""
    lines = printed.strip().splitlines()
    return f"; it printed last: {lines[-1][:MOST_PRINTED_CHARACTERS]}" if lines else ""


def _attempt(rollout: Rollout) -> Attempt:
    return Attempt(
        prompt_text=rollout.prompt.text,
        response_text=rollout.text,
        answer=rollout.prompt.answer,
        num_response_tokens=rollout.num_sampled_tokens,
        finish_reason=rollout.finish_reason,
        fields=rollout.prompt.fields,
        source=rollout.prompt.source,
    )
