"""Says which session a process runs at this moment, in memory that the runner can read while the process hangs or after
it has died."""

import asyncio
import contextvars
import mmap
import os
import struct
from collections.abc import Coroutine, Generator
from typing import Any

FORMAT = struct.Struct("=qq")
NONE = 0
"""Stands for no session."""
SESSION: contextvars.ContextVar[int] = contextvars.ContextVar("session", default=NONE)
"""The session that a task belongs to, and all tasks that it starts."""


class Marks:
    """The number of the session that runs, and how often the process has gone from one to another."""

    def __init__(self, descriptor: int):
        """
        Args:
            descriptor: of `memory`.
        """
        self._memory = mmap.mmap(descriptor, FORMAT.size)
        self._switches = 0
        self._owner = os.getpid()

    @staticmethod
    def memory() -> int:
        """Returns the descriptor of new memory, which a child process can inherit."""
        descriptor = os.memfd_create("session marks")
        os.ftruncate(descriptor, FORMAT.size)
        return descriptor

    def write(self, session: int) -> None:
        """Notes that `session` runs from now on. Ends this process if it is a fork of the one that runs sessions: a
        session that forks returns twice, and only one of them may go on."""
        if os.getpid() != self._owner:
            os._exit(0)
        self._switches += 1
        FORMAT.pack_into(self._memory, 0, session, self._switches)

    def read(self) -> tuple[int, int]:
        """Returns the session that runs, or NONE, and the number of times that this has changed."""
        session, switches = FORMAT.unpack_from(self._memory)
        return session, switches

    def close(self) -> None:
        """Releases the memory."""
        self._memory.close()


class Marked:
    """A coroutine that notes its session whenever it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], marks: Marks):
        self._coroutine, self._marks = coroutine, marks

    def __await__(self) -> Generator[Any, Any, Any]:
        """Runs the coroutine, with a mark from each time it goes on to the next time it waits."""
        session, send = SESSION.get(), self._coroutine.send
        argument: Any = None
        while True:
            self._marks.write(session)
            try:
                waits_for = send(argument)
            except StopIteration as end:
                return end.value
            finally:
                self._marks.write(NONE)
            try:
                argument = yield waits_for
                send = self._coroutine.send
            except BaseException as error:  # Cancellation, which the coroutine may catch.
                argument, send = error, self._coroutine.throw


def factory(marks: Marks) -> Any:
    """Returns the function that an event loop makes its tasks with, so that each notes its session."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> "asyncio.Task[Any]":
        async def run() -> Any:
            return await Marked(coroutine, marks)

        return asyncio.Task(run() if asyncio.iscoroutine(coroutine) else coroutine, loop=loop, **named)

    return make
