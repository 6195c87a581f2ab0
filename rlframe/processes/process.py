"""One worker as seen by the pool. Nothing here waits, so a stopped or misbehaving process blocks nobody."""

import json
import math
import os
import pickle
import time
from collections import deque
from typing import Any

from rlframe.processes.spawned import READ_BYTES, Spawned
from rlframe.processes.work import Failed, Limits, Work
from rlframe.processes.worker import LONGEST_MESSAGE, STARTED

START_TIMEOUT_S = 120.0

Task = tuple[int, Any]
"""With its number."""
ROUND_AN_ANSWER_BYTES = 6 * LONGEST_MESSAGE + 100
"""The rest of a line: the key, the number and an error, each of whose characters may take six bytes."""


class Process:
    """One worker process, the three pipes to it, and its tasks."""

    def __init__(self, work: Work, limits: Limits):
        """Starts the process without waiting for it."""
        self._work, self._limits = work, limits
        self._spawned = Spawned("rlframe.processes.worker")
        self._to_send = bytearray(pickle.dumps((self._spawned.key, work, limits)))
        self._received = bytearray()
        self._started = False
        self._tasks: deque[Task] = deque()
        self._done_kinds: set[str] = set()
        """Kinds of tasks that it has done."""
        self.refusal: str | None = None
        """The reason for which no process can prepare the work; None as long as none is known."""
        self.deadline = math.inf
        """Monotonic time by which the next answer must arrive."""

    @property
    def is_idle(self) -> bool:
        """Returns whether the process waits for work."""
        return self._started and not self._tasks

    @property
    def is_starting(self) -> bool:
        """Returns whether the process has yet to report that it is ready. False for one that died idle and was then
        given work."""
        return not self._started and not self._tasks

    @property
    def readable(self) -> list[int]:
        """The descriptors that `take` reads."""
        spawned = self._spawned
        return [spawned.answers, spawned.prints] if spawned.can_print else [spawned.answers]

    @property
    def writable(self) -> list[int]:
        """The descriptor that `send` writes to, while there is something to write."""
        return [self._spawned.requests] if self._to_send else []

    def expect_start(self) -> None:
        """Starts the time limit of the process's start. It may take its time until then, because its output is not
        read."""
        if self.is_starting and math.isinf(self.deadline):
            self.deadline = time.monotonic() + START_TIMEOUT_S

    def assign(self, tasks: list[Task]) -> None:
        """Assigns a chunk of tasks. Pickle writes once what several of them share."""
        self._tasks.extend(tasks)
        self._to_send += pickle.dumps(tasks)
        self.deadline = time.monotonic() + self.limit_s

    @property
    def limit_s(self) -> float:
        """The seconds that its present task may take."""
        _, task = self._tasks[0]
        least_s = 0.0 if self._work.kind(task) in self._done_kinds else self._limits.first_s
        return max(least_s, self._work.limit_s(task, self._limits))

    def send(self) -> None:
        """Writes as much as the pipe accepts."""
        try:
            del self._to_send[: os.write(self._spawned.requests, self._to_send)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # It died while idle, which `take` detects next. No task of this chunk has begun, so none has failed.
            self._started = False
            self._to_send.clear()

    def take(self, results: dict[int, Any]) -> str | None:
        """Reads available answers into `results`, by number.

        Returns:
            Why the process is unusable, or None.
        """
        self._spawned.read_printed()
        try:
            data = os.read(self._spawned.answers, READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            return f"ended the worker process (exit code {self._spawned.exit_code()})"
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > self._limits.answer_bytes + ROUND_AN_ANSWER_BYTES:
            return "wrote into the pipe of the answers"
        for line in lines:
            if trouble := self._answer(line, results):
                return trouble
        return None

    def _answer(self, line: bytes | bytearray, results: dict[int, Any]) -> str | None:
        """Processes one line. Returns why the process is unusable, or None."""
        try:
            key, number, why, value = json.loads(line)
        except (ValueError, TypeError):
            return "wrote into the pipe of the answers"
        expected = self._tasks[0][0] if self._tasks and self._started else STARTED
        if key != self._spawned.key or number != expected:
            return "wrote into the pipe of the answers"
        if number == STARTED:
            self.refusal = why
            self._started = why is None
        else:
            number, task = self._tasks.popleft()
            self._done_kinds.add(self._work.kind(task))
            results[number] = value if why is None else Failed(why)
        self.deadline = time.monotonic() + self.limit_s if self._tasks else math.inf
        return None

    def printed(self) -> str:
        """Returns the end of its output since the last call."""
        return self._spawned.printed()

    def give_up(self, trouble: str, results: dict[int, Any]) -> list[Task]:
        """Marks the current task as failed, if one was begun, and returns the others."""
        if self._started and self._tasks:
            results[self._tasks.popleft()[0]] = Failed(trouble)
        return list(self._tasks)

    def kill(self) -> None:
        """Kills the process and everything in its session, and closes the pipes. A second call does nothing."""
        self._spawned.kill()
