"""One process of sessions as seen by the pool. Everything here runs in one event loop, and nothing blocks it."""

import asyncio
import json
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from rlframe.attempts.sessions.calls import ANSWER_BYTES, Call, CannotStart, Numbered, SessionFailed, Setup, Trouble
from rlframe.attempts.sessions.marks import NONE, Marks
from rlframe.attempts.sessions.worker import LENGTH
from rlframe.processes.spawned import READ_BYTES, Spawned
from rlframe.processes.worker import STARTED

START_TIMEOUT_S = 120.0
LOOKS = 4
"""Number of times within the limit of a step that a process is looked at."""
SILENT = 3
"""A process that answers none of its calls, and runs no session, is ended after this many times the limit of a step."""


class Process:
    """A process, its calls that have no answer, and its sessions."""

    def __init__(self, setup: Setup, *, ended: Callable[["Process"], None]):
        """Starts the process without waiting for it.

        Args:
            ended: called once, when the process can no longer be used.
        """
        self._setup, self._ended = setup, ended
        memory = Marks.memory()
        try:
            self._marks = Marks(memory)
            self._spawned = Spawned("rlframe.attempts.sessions.worker", str(memory), inherited=(memory,))
        finally:
            os.close(memory)
        self.sessions: set[int] = set()
        """Numbers of its open sessions."""
        self._calls: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        """The session of each call without an answer, and who waits for it."""
        self._next = 0
        self._received = bytearray()
        self._to_send = bytearray(pickle.dumps((self._spawned.key, setup)))
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._is_over, self._why, self._culprit = False, "", NONE
        self._seen, self._seen_s = (NONE, -1), time.monotonic()
        self._answered_s = time.monotonic()
        self._loop.add_reader(self._spawned.answers, self._read)
        self._loop.add_reader(self._spawned.prints, self._read_printed)
        self._send()
        self._watching = self._loop.call_later(setup.environment.step_timeout_s / LOOKS, self._watch)
        self._limit = self._loop.call_later(START_TIMEOUT_S, self._fail_start)

    async def ready(self) -> None:
        """Waits until the process has prepared its environment.

        Raises:
            CannotStart: it cannot.
        """
        await asyncio.shield(self._started)

    async def call(self, session: int, call: Call) -> Any:
        """Returns the answer of a session.

        Raises:
            SessionFailed: it failed, or its process did.
        """
        if self._is_over:
            raise SessionFailed(self._trouble_of(session), self._why)
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        if not self._calls:
            self._answered_s = time.monotonic()
        self._calls[number] = session, answer
        pickled = pickle.dumps(Numbered(number=number, session=session, call=call))
        self._to_send += LENGTH.pack(len(pickled)) + pickled
        self._send()
        return await answer

    def printed(self) -> str:
        """Returns the end of what it has printed since the last call."""
        return "" if self._is_over else self._spawned.printed()

    def kill(self, why: str = "its process was ended", culprit: int = NONE) -> None:
        """Ends the process and all of its sessions. A second call does nothing.

        Args:
            culprit: session on whose account it ends; the other ones are its neighbours. NONE: nobody knows, unless
                there is only one.
        """
        if self._is_over:
            return
        self._is_over = True
        if not culprit and len(self.sessions) == 1:
            (culprit,) = self.sessions
        # Sessions without a call at this moment learn of it by their next one.
        self._why, self._culprit = why, culprit
        for descriptor in (self._spawned.answers, self._spawned.prints):
            self._loop.remove_reader(descriptor)
        self._loop.remove_writer(self._spawned.requests)
        self._watching.cancel()
        self._limit.cancel()
        self._spawned.kill()
        self._marks.close()
        calls, self._calls = self._calls, {}
        for session, answer in calls.values():
            if answer.done():
                continue
            answer.set_exception(SessionFailed(self._trouble_of(session), why))
        if not self._started.done():
            self._started.set_exception(CannotStart(why))
            self._started.exception()  # Whoever waits gets it; nobody has to.
        self._ended(self)

    def _trouble_of(self, session: int) -> Trouble:
        """Returns what a session is told when its process has ended."""
        return Trouble.DIED if session == self._culprit else Trouble.NEIGHBOUR

    def _send(self) -> None:
        """Writes as much as the pipe accepts, and the rest later."""
        try:
            del self._to_send[: os.write(self._spawned.requests, self._to_send)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return  # It has died, which `_read` sees.
        self._loop.remove_writer(self._spawned.requests)
        if self._to_send:
            self._loop.add_writer(self._spawned.requests, self._send)

    def _read(self) -> None:
        """Reads answers, or that the process has died."""
        try:
            data = os.read(self._spawned.answers, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            last = self._spawned.printed().strip().splitlines()[-1:]
            said = f"; it printed last: {last[0][:200]}" if last else ""
            code = self._spawned.exit_code()
            self.kill(f"it ended its process (exit code {code}){said}", self._marks.read()[0])
            return
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > 2 * ANSWER_BYTES or not all(map(self._take, lines)):
            self.kill("it wrote into the pipe of the answers", self._marks.read()[0])

    def _take(self, line: bytearray) -> bool:
        """Processes one line. Returns whether it is an answer."""
        try:
            key, number, trouble, why, value = json.loads(line)
        except (ValueError, TypeError):
            return False
        if key != self._spawned.key:
            return False
        self._answered_s = time.monotonic()
        if number == STARTED:
            self._limit.cancel()
            if trouble:
                self.kill(why)
            elif not self._started.done():
                self._started.set_result(None)
            return True
        if number not in self._calls:
            return False
        _, answer = self._calls.pop(number)
        if answer.done():
            return True
        if trouble:
            answer.set_exception(SessionFailed(Trouble(trouble), why))
        else:
            answer.set_result(value)
        return True

    def _read_printed(self) -> None:
        self._spawned.read_printed()
        if not self._spawned.can_print:
            self._loop.remove_reader(self._spawned.prints)

    def _watch(self) -> None:
        """Ends the process if one session has held it up for longer than a step may take."""
        limit_s, now_s = self._setup.environment.step_timeout_s, time.monotonic()
        self._watching = self._loop.call_later(limit_s / LOOKS, self._watch)
        mark = self._marks.read()
        if mark != self._seen:
            self._seen, self._seen_s = mark, now_s
            return
        still_s = now_s - self._seen_s
        if mark[0] != NONE and still_s > limit_s:
            self.kill(f"it kept its process busy for longer than {limit_s:g} s", mark[0])
        elif self._calls and self._started.done() and min(still_s, now_s - self._answered_s) > SILENT * limit_s:
            self.kill(f"its process answered no call for {SILENT * limit_s:g} s")

    def _fail_start(self) -> None:
        self.kill(f"was not ready within {START_TIMEOUT_S:g} s")
