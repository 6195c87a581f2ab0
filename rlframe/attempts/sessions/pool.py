"""The sessions of the runner's attempts, spread over processes."""

import asyncio
import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlframe.attempts.sessions.calls import (
    Call,
    CannotStart,
    Close,
    Look,
    Opening,
    Reset,
    Run,
    SessionFailed,
    Setup,
    Trouble,
)
from rlframe.attempts.sessions.process import Process
from rlframe.environments.base import Endpoint, Step, Turn
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import RlframeError

logger = logging.getLogger(__name__)
MOST_PRINTED_LINES, MOST_PRINTED_CHARACTERS = 20, 200
"""Limits of what is passed on of what sessions print: the last lines of each process, truncated."""
LONE_PER_WORKER = 4
"""Greatest number of processes of one session each, for each of `environment.workers`. They take 170 MB and more: when
every session of a step had one, 130 of them took all memory of a machine of 24 GB."""
FAILED_STARTS = 3
"""Number of processes in a row that must fail to start before none can."""


class SessionPool:
    """Opens sessions. Everything runs in one event loop."""

    def __init__(self, setup: Setup):
        """Starts the processes without waiting for them."""
        self._setup = setup
        self._numbers = itertools.count(1)
        self._failed_starts: set[Process] = set()
        """Processes that did not start, since the last one that did."""
        self._closed = False
        self._single: set[Process] = set()
        """Processes of one session each."""
        self._places = asyncio.Semaphore(LONE_PER_WORKER * setup.environment.workers)
        """Places of further ones."""
        self._processes = [self._start() for _ in range(setup.environment.workers)]

    async def open(self, prompt: Prompt, *, seed: int, alone: bool = False) -> "Session":
        """Begins a session at a prompt.

        Args:
            alone: whether it gets a process of its own, because several processes have ended under it and nobody knows
                on whose account. It waits while there are too many of these.

        Raises:
            SessionFailed: the environment failed, or the pool was closed.
            RlframeError: processes cannot be started.
        """
        session = await self._begun(alone=alone)
        try:
            opening = await session.call(Reset.of(prompt, seed=seed))
        except asyncio.CancelledError:
            session.abandon()
            raise
        session.opening = Opening(**opening)
        return session

    def printed(self) -> Iterator[str]:
        """Yields the last lines that sessions have printed since the last call."""
        for process in self._processes:
            for line in process.printed().splitlines()[-MOST_PRINTED_LINES:]:
                yield line[:MOST_PRINTED_CHARACTERS]

    def close(self) -> None:
        """Ends all processes."""
        self._closed = True
        for process in (*self._processes, *list(self._single)):
            process.kill()

    async def _begun(self, *, alone: bool) -> "Session":
        """Returns a session of a process that can be used. It counts there while the process starts, because all who
        come meanwhile would choose the same one."""
        while True:
            process = await self._one_more() if alone else min(self._processes, key=lambda each: len(each.sessions))
            session = Session(process, next(self._numbers), alone=alone)
            try:
                await process.ready()
            except CannotStart as error:
                session.leave()
                self._failed_starts.add(process)
                if len(self._failed_starts) >= FAILED_STARTS:
                    raise RlframeError(
                        f"processes of environment.name={self._setup.environment.name} cannot start: {error}"
                    ) from None
                continue
            except asyncio.CancelledError:
                session.leave()
                raise
            self._failed_starts.clear()
            return session

    async def _one_more(self) -> Process:
        """Starts a process for one session, once there is a place for it.

        Raises:
            SessionFailed: the pool was closed.
        """
        await self._places.acquire()
        if self._closed:
            self._places.release()
            raise SessionFailed(Trouble.DIED, "its process was ended")
        process = Process(self._setup, ended=self._leave_place)
        self._single.add(process)
        return process

    def _leave_place(self, process: Process) -> None:
        """Gives the place of a process that has ended to the next session."""
        self._single.discard(process)
        self._places.release()

    def _start(self) -> Process:
        return Process(self._setup, ended=self._replace)

    def _replace(self, process: Process) -> None:
        """Replaces a process that has ended. Its sessions fail by themselves."""
        if not self._closed:
            self._processes[self._processes.index(process)] = self._start()


async def _started(setup: Setup) -> None:
    process = Process(setup, ended=lambda ended: None)
    try:
        await process.ready()
    finally:
        process.kill()


def try_start(setup: Setup) -> None:
    """Starts one process, which prepares the environment, and ends it again.

    Raises:
        CannotStart: the process does not start; the message gives the reason.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_started(setup))
        return
    # A notebook runs its cells in a loop, which takes no second one in its thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _started(setup)).result()


class Session:
    """The session of one attempt."""

    opening: Opening
    """Its beginning."""

    def __init__(self, process: Process, number: int, *, alone: bool):
        self._process, self._number, self._alone = process, number, alone
        process.sessions.add(number)

    async def step(self, turn: Turn) -> Step:
        """Returns the environment's answer to a turn.

        Raises:
            SessionFailed: the environment failed.
        """
        return Step(**await self.call(turn))

    async def run(self, endpoint: Endpoint) -> None:
        """Lets the agent of the session begin.

        Raises:
            SessionFailed: the environment failed.
        """
        await self.call(Run(endpoint=endpoint))

    async def look(self, *, wait_s: float) -> Step | None:
        """Returns how the agent has ended, or None if it has not after a while.

        Raises:
            SessionFailed: the environment failed.
        """
        step = await self.call(Look(wait_s=wait_s))
        return step and Step(**step)

    async def close(self) -> None:
        """Releases what the session holds.

        Raises:
            SessionFailed: the environment failed.
        """
        try:
            await self.call(Close())
        finally:
            self.leave()

    def abandon(self) -> None:
        """Makes the process release what the session holds, without waiting."""
        task = asyncio.get_running_loop().create_task(self.close())
        BACKGROUND.add(task)
        task.add_done_callback(forget)

    async def call(self, call: Call) -> Any:
        """Returns the answer to a call.

        Raises:
            SessionFailed: the environment failed.
        """
        try:
            return await self._process.call(self._number, call)
        except SessionFailed:
            self.leave()
            raise

    def leave(self) -> None:
        """Gives up its place in the process, and the process if that has no other."""
        self._process.sessions.discard(self._number)
        if self._alone:
            self._process.kill()


BACKGROUND: set["asyncio.Task[None]"] = set()
"""The tasks that nobody waits for."""


def forget(task: "asyncio.Task[None]") -> None:
    """Ends a task that nobody waited for. Failures at the end of an abandoned session concern nobody."""
    BACKGROUND.discard(task)
    if not task.cancelled() and (error := task.exception()) and not isinstance(error, SessionFailed):
        logger.warning("the end of a session failed: %r", error)
