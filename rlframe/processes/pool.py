"""A pool of processes that do tasks in parallel, each within its time.

A task that hangs, raises or crashes is one failed task.

It is not a library's process pool, because spawned workers of a pool import the parent's main module, and with it
torch, ray and megatron. They also report a chunk at a time, so that a hang cannot be attributed to one task. Here a
worker is a bare interpreter that imports only its work, and it reports every task.
"""

import math
import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from rlframe.processes.process import START_TIMEOUT_S, Process
from rlframe.processes.work import Limits, PoolError, Work

LARGEST_CHUNK = 64
MOST_PRINTED_LINES, MOST_PRINTED_CHARACTERS = 20, 200
"""Limits of what is passed on of the tasks' output: the last lines of each worker, truncated."""


class Pool:
    """Does tasks. Close it, or use it as a context manager."""

    def __init__(self, work: Work, limits: Limits, *, size: int, name: str):
        """Starts the workers without waiting for them.

        Args:
            size: processes.
            name: of the work, for messages: "reward".

        Raises:
            PoolError: the system does not start them.
        """
        self._work, self._limits, self.name = work, limits, name
        self._workers = [self._new_worker() for _ in range(size)]
        self._failed_starts = 0
        """Number of consecutive workers that died while they started."""
        self._waiting: deque[list[tuple[int, Any]]] = deque()
        """Chunks of numbered tasks that no worker has."""
        self._results: dict[int, Any] = {}
        self._submitted = 0
        self._open = 0
        """Tasks submitted and not taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. The pool cannot be used afterwards."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def run(self, tasks: Sequence[Any]) -> list[Any]:
        """Returns the value of each task, or Failed.

        Raises:
            PoolError: workers cannot be started. A task that fails never raises.
        """
        numbers, found = self.submit(tasks), {}
        while len(found) < len(numbers):
            found |= self.take()
        return [found[number] for number in numbers]

    def submit(self, tasks: Sequence[Any]) -> range:
        """Gives tasks to be done, in chunks that share what they have in common; returns the number of each."""
        assert self._workers, "this pool is closed"
        numbers = range(self._submitted, self._submitted + len(tasks))
        self._submitted += len(tasks)
        self._open += len(tasks)
        size = max(1, min(LARGEST_CHUNK, math.ceil(len(tasks) / (4 * len(self._workers)))))
        numbered = list(zip(numbers, tasks, strict=True))
        self._waiting.extend(numbered[start : start + size] for start in range(0, len(tasks), size))
        return numbers

    def take(self, wait_s: float = math.inf, *, wake: int | None = None) -> dict[int, Any]:
        """Returns the values, or Failed, of tasks that were done since the last call, by number.

        Args:
            wait_s: how long to wait for the first; nothing is returned where no task is left.
            wake: descriptor that ends the wait when it can be read. With it a pool without tasks waits too.

        Raises:
            PoolError: workers cannot be started. The pool is closed.
        """
        until = time.monotonic() + wait_s
        try:
            while not self._results and (self._open or wake is not None):
                ready = self._turn(until, wake)
                if wake in ready or time.monotonic() >= until:
                    break
        except BaseException:
            # Workers may still hold tasks; their answers must not be mistaken for those of other tasks.
            self.close()
            raise
        found, self._results = self._results, {}
        self._open -= len(found)
        return found

    def printed(self) -> Iterator[str]:
        """Yields the last lines that tasks have printed since the last call."""
        for worker in self._workers:
            for line in worker.printed().splitlines()[-MOST_PRINTED_LINES:]:
                yield line[:MOST_PRINTED_CHARACTERS]

    def try_start(self) -> None:
        """Waits until a worker is ready.

        Raises:
            PoolError: the worker cannot be started; the message gives the reason.
        """
        worker = self._workers[0]
        worker.send()
        worker.expect_start()
        while worker.is_starting:
            trouble = worker.take(self._results) if wait([worker]) & set(worker.readable) else None
            if not trouble and time.monotonic() > worker.deadline:
                trouble = f"was not ready within {START_TIMEOUT_S:g} s"
            if trouble or worker.refusal:
                reason = worker.refusal or f"it {trouble}{last_line(worker.printed())}"
                raise PoolError(f"a {self.name} worker cannot start: {reason}")

    def _turn(self, until: float, wake: int | None) -> set[int]:
        """Gives out chunks, waits until something happens, and sees what has. Returns which descriptors are ready."""
        for worker in self._workers:
            worker.expect_start()
            if worker.is_idle and self._waiting:
                worker.assign(self._waiting.popleft())
        ready = wait(self._workers, until, wake=wake)
        for place, worker in enumerate(self._workers):
            if ready & set(worker.writable):
                worker.send()
            before = len(self._results)
            # What came in time counts, even if this process was kept from reading it.
            is_late = time.monotonic() > worker.deadline
            trouble = worker.take(self._results) if is_late or ready & set(worker.readable) else None
            if worker.refusal:
                raise PoolError(f"a {self.name} worker cannot start: {worker.refusal}")
            if len(self._results) > before:
                self._failed_starts = 0
            if not trouble and time.monotonic() > worker.deadline:
                limit_s = self._limits.timeout_s if worker.is_starting else worker.limit_s
                trouble = f"took longer than {limit_s} s"
            if trouble:
                self._replace(place, trouble)
        return ready

    def _replace(self, place: int, trouble: str) -> None:
        """Ends a worker in trouble, passes on the tasks it did not begin, and starts another one."""
        worker = self._workers[place]
        printed = worker.printed()
        worker.kill()
        if worker.is_starting:
            self._count_failed_start(trouble, printed)
        if rest := worker.give_up(trouble, self._results):
            self._waiting.appendleft(rest)
        self._workers[place] = self._new_worker()

    def _new_worker(self) -> Process:
        try:
            return Process(self._work, self._limits)
        except OSError as error:
            raise PoolError(f"a {self.name} worker cannot start: {error.strerror or error}") from error

    def _count_failed_start(self, trouble: str, printed: str) -> None:
        """Counts consecutive workers that failed to start. One may be killed while it starts, for example for memory;
        several in a row mean that none can start."""
        self._failed_starts += 1
        if self._failed_starts > len(self._workers):
            raise PoolError(f"{self.name} workers cannot start: the last one {trouble}{last_line(printed)}")


def wait(workers: Sequence[Process], until: float = math.inf, *, wake: int | None = None) -> set[int]:
    """Returns the descriptors of `workers`, and `wake`, that are ready, when there is one, or the first deadline or
    `until` has passed."""
    poll = select.poll()
    if wake is not None:
        poll.register(wake, select.POLLIN)
    for worker in workers:
        for descriptor in worker.readable:
            poll.register(descriptor, select.POLLIN)
        for descriptor in worker.writable:
            poll.register(descriptor, select.POLLOUT)
    left_s = max(0.0, min(until, *(worker.deadline for worker in workers)) - time.monotonic())
    assert math.isfinite(left_s) or wake is not None, "a worker is busy or starting"
    return {descriptor for descriptor, _ in poll.poll(math.ceil(left_s * 1000) if math.isfinite(left_s) else None)}


def last_line(printed: str) -> str:
    """Returns the last line that a worker printed, as the end of a sentence."""
    lines = printed.strip().splitlines()
    return f"; it printed last: {lines[-1][:MOST_PRINTED_CHARACTERS]}" if lines else ""
