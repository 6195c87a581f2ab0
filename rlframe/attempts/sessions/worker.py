"""The program of a process of sessions: `python -m rlframe.attempts.sessions.worker REQUESTS ANSWERS MARKS`, three
descriptors.

All of its sessions share one event loop. Each call is answered by one line as soon as it has ended, or its time is
over. Whatever a session prints, raises, forks, or allocates must end that session only; what blocks the loop or ends
the process is found by the marks.
"""

import asyncio
import json
import os
import pickle
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NoReturn

from rlframe.attempts.sessions.calls import Close, Look, Numbered, Opening, Reset, Run, Setup, Trouble
from rlframe.attempts.sessions.marks import NONE, SESSION, Marks, factory
from rlframe.environments.base import Agent, Endpoint, Environment, Step, Turn, opened
from rlframe.processes.spawned import end_session
from rlframe.processes.worker import STARTED, described, limit

LENGTH = struct.Struct("=Q")
"""Length in bytes of the pickle that follows it."""
LARGEST_FILE_BYTES = 1 << 30
"""Greatest size of a file that a session can write."""
THREADS = 256
"""Greatest number of plain functions that sessions run at the same time, such as tools."""
ORPHAN_S = 2.0
"""Seconds between two looks at whether the runner is alive."""


class NoAnswer(Exception):
    """Raised if a session returns something that is no answer."""


class Sessions:
    """The sessions of this process."""

    def __init__(self, component: type[Environment], settings: Any, setup: Setup, write: Any):
        """
        Args:
            write: sends the number of a call with its trouble, why, and the JSON of its value.
        """
        self._component, self._settings, self._limits, self._write = component, settings, setup.limits, write
        self._open: dict[int, Environment] = {}
        self._agents: dict[int, asyncio.Task[Any]] = {}
        """The agents of sessions, which give what they return or raise."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, numbered: Numbered) -> None:
        """Begins a call."""
        token = SESSION.set(numbered.session)
        self._keep(self._answer(numbered))
        SESSION.reset(token)

    async def _answer(self, numbered: Numbered) -> None:
        """Answers a call, in time. A session that ignores its cancellation is left behind."""
        limit_s = self._limits.timeout_s
        work = asyncio.get_running_loop().create_task(self._attempted(numbered))
        await asyncio.wait([work], timeout=limit_s)
        if work.done():
            trouble, why, value = work.result()
        else:
            work.cancel()
            trouble, why, value = Trouble.TOOK_TOO_LONG, f"took longer than {limit_s:g} s", "null"
        if isinstance(numbered.call, Close):
            self._open.pop(numbered.session, None)
        elif trouble and (session := self._open.pop(numbered.session, None)):
            self._keep(self._released(numbered.session, session))
        self._write(numbered.number, trouble, why, value)

    async def _released(self, number: int, session: Environment) -> None:
        """Closes a session that has failed, which may fail too."""
        work = asyncio.get_running_loop().create_task(self._quietly(number, session))
        await asyncio.wait([work], timeout=self._limits.timeout_s)
        work.cancel()

    async def _quietly(self, number: int, session: Environment) -> None:
        try:
            await self._close(number, session)
        except BaseException as error:  # One attempt, which has failed already.
            sys.stderr.write(f"close() of a session that had failed: {described(error)}\n")

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attempted(self, numbered: Numbered) -> tuple[str | None, str | None, str]:
        """Returns the trouble and why, or None and the JSON of the answer."""
        try:
            value = json.dumps(await self._do(numbered))
        except NoAnswer as error:
            return Trouble.NO_ANSWER, str(error), "null"
        except BaseException as error:  # One attempt: whatever users' code raises, SystemExit and cancellation too.
            return Trouble.RAISED, described(error), "null"
        if len(value) > self._limits.answer_bytes:
            most = self._limits.answer_bytes
            return Trouble.NO_ANSWER, f"an answer must have at most {most} bytes of JSON, got {len(value)}", "null"
        return None, None, value

    def _do(self, numbered: Numbered) -> Coroutine[Any, Any, Any]:
        number = numbered.session
        if isinstance(call := numbered.call, Reset):
            return self._reset(number, call)
        session = self._open[number]
        if isinstance(call, Run):
            return self._run(number, session, call.endpoint)
        if isinstance(call, Look):
            return self._look(number, call.wait_s)
        return self._step(session, call) if isinstance(call, Turn) else self._close(number, session)

    async def _reset(self, number: int, call: Reset) -> dict[str, Any]:
        session = self._open[number] = self._component(self._settings)
        messages = await session.reset(call.prompt, seed=call.seed)
        if isinstance(session, Agent):
            # It says by its calls what the policy sees.
            return asdict(Opening(messages=[], tools=[]))
        try:
            return asdict(Opening(messages=opened(messages), tools=[dict(tool) for tool in session.tools]))
        except (TypeError, ValueError) as error:
            raise NoAnswer(str(error)[:600]) from None

    async def _step(self, session: Environment, turn: Turn) -> dict[str, Any]:
        step = await session.step(turn)
        if not isinstance(step, Step):
            raise NoAnswer(f"step must return a Step, got {step!r:.80}")
        return asdict(step)

    async def _run(self, number: int, session: Environment, endpoint: Endpoint) -> None:
        """Lets an agent begin."""
        assert isinstance(session, Agent)

        async def ended() -> Any:
            try:
                return await session.run(endpoint)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # One attempt: SystemExit in a task of its own would end the process.
                return error

        self._agents[number] = asyncio.get_running_loop().create_task(ended())

    async def _look(self, number: int, wait_s: float) -> dict[str, Any] | None:
        """Returns how an agent has ended, or None if it goes on."""
        agent = self._agents[number]
        await asyncio.wait([agent], timeout=wait_s)
        if not agent.done():
            return None
        step = await agent
        if isinstance(step, BaseException):
            raise step
        if not isinstance(step, Step) or not step.is_over:
            raise NoAnswer(f"run must return a Step that ends the attempt, got {step!r:.80}")
        return asdict(step)

    async def _close(self, number: int, session: Environment) -> None:
        """Closes a session, after its agent, if it has one."""
        if agent := self._agents.pop(number, None):
            agent.cancel()
            # Nobody waits for what it ends with.
            await asyncio.gather(agent, return_exceptions=True)
        await session.close()


def main() -> None:
    """Reads the key and the settings, reports that it is ready, and serves sessions until the pipe closes."""
    # Whoever sends it means another process. Programs that a session starts get the default again.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    requests, answers, marks = os.fdopen(int(sys.argv[1]), "rb"), int(sys.argv[2]), Marks(int(sys.argv[3]))
    key, setup = pickle.load(requests)
    limit(setup.limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))

    def write(number: int, trouble: str | None, why: str | None, value: str) -> None:
        line = f"[{json.dumps(key)}, {number}, {json.dumps(trouble)}, {json.dumps(why)}, {value}]\n".encode("ascii")
        try:
            while line:
                line = line[os.write(answers, line) :]
        except OSError as error:
            leave(marks, error)

    try:
        os.chdir(setup.folder)
        component, settings = setup.prepare()
    except BaseException as error:  # A user's file may raise anything; the pool reports it.
        write(STARTED, Trouble.RAISED, described(error), "null")
        return
    write(STARTED, None, None, "null")
    threading.Thread(target=leave_with, args=[os.getppid()], daemon=True).start()
    runner = asyncio.Runner()
    runner.get_loop().set_task_factory(factory(marks))
    try:
        runner.run(serve(requests, Sessions(component, settings, setup, write)))
    except BaseException as error:  # A session has damaged what all of them share.
        leave(marks, error)
    end_session(os.getpid())
    # Not at leisure: threads of sessions may run for ever.
    os._exit(0)


def leave(marks: Marks, error: BaseException) -> NoReturn:
    """Ends this process, for which no session can be found guilty."""
    marks.write(NONE)
    sys.stderr.write(f"{described(error)}\n")
    os._exit(1)


def leave_with(parent: int) -> None:
    """Ends this process after its parent, however busy the event loop is."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_S)
    end_session(os.getpid())
    os._exit(0)


async def serve(requests: Any, sessions: Sessions) -> None:
    """Begins calls as they arrive, until the pipe closes."""
    reader = asyncio.StreamReader()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="session"))
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            sessions.begin(pickle.loads(await reader.readexactly(length)))
        except asyncio.IncompleteReadError:
            return


if __name__ == "__main__":
    main()
