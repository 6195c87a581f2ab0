"""Answers to the calls that come through the socket to the process of `sglang.Engine`, many at a time."""

import asyncio
import pickle
import threading
from collections.abc import Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rlframe.rollout.sglang.border import EngineHost
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import RlframeError

Call = RankCall[EngineHost, Coroutine[Any, Any, Any]]


async def serve(host: EngineHost, connection: Connection) -> None:
    """Executes calls on `host` until the other end closes. Every call gets an answer: its result, or what it raised."""
    loop, closed, tasks = asyncio.get_running_loop(), asyncio.Event(), set()

    def begin(number: int, call: Call) -> None:
        task = loop.create_task(packed(host, number, call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(partial(answer, connection, number))

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(begin, *pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=read, name="calls", daemon=True).start()
    await closed.wait()


async def packed(host: EngineHost, number: int, call: Call) -> bytes:
    """Returns the message with the result of a call."""
    return pickle.dumps((number, await call.on(host), None))


def answer(connection: Connection, number: int, task: "asyncio.Task[bytes]") -> None:
    """Sends the message of a call that is done, or what it raised. SGLang raises errors of many libraries, such as
    fastapi's for a request that it gives up; the other end has none of them, and gets their text."""
    failure = asyncio.CancelledError() if task.cancelled() else task.exception()
    if failure is None:
        connection.send_bytes(task.result())
        return
    told = failure if isinstance(failure, RlframeError) else RlframeError(f"SGLang: {failure!r}")
    connection.send_bytes(pickle.dumps((number, None, told)))
