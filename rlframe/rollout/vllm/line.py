"""Lines from the engine to the workers of vLLM, beside the calls of vLLM itself.

vLLM (0.26 to 0.32) makes a call in its workers behind every step that is under way, and begins no step until it is
answered (`MultiprocExecutor.collective_rpc`), so that the device waits. Each response that ends by itself has such a
call for its logprobs, which need nothing of steps to come. Such a call also passes vLLM's core in both directions, 2.5
ms in a weight sync. A thread of the worker answers both here. This file can go when vLLM makes calls in its workers
while steps are under way, in less than 1 ms.
"""

import asyncio
import json
import logging
import socket
import struct
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch

from rlframe.rollout.vllm.fetch import Take, Wanted

TAKE, CALL = b"t", b"c"
"""First bytes of messages: what is asked for."""
CONNECT_S = 60.0
"""Seconds in which the engine connects."""
LENGTH = struct.Struct(">Q")
"""Number of bytes of a message, ahead of it."""
logger = logging.getLogger(__name__)


def answering(answers: Mapping[bytes, Callable[[bytes], bytes]], device: torch.device) -> str:
    """Answers the engine in a thread of this worker until the engine is gone. Returns the address at which it connects,
    empty if there can be none.

    Args:
        answers: by the first byte of a message, a function of the others.
        device: that of the worker.
    """
    found = bound()
    if found is None:
        return ""
    folder, listener, address = found
    listener.listen(1)
    listener.settimeout(CONNECT_S)

    def run() -> None:
        # Only the engine connects: nobody else enters a folder that its owner alone may read, and nobody twice.
        with folder, listener:
            connection, _ = listener.accept()
        connection.settimeout(None)
        if device.type == "cuda":
            # Of this thread too. CUDA would otherwise make a context on the first device.
            torch.cuda.set_device(device)
        with connection:
            for message in messages(connection):
                send(connection, answers[message[:1]](message[1:]))

    threading.Thread(target=run, name="rlframe-line", daemon=True).start()
    return address


def bound() -> tuple[tempfile.TemporaryDirectory[str], socket.socket, str] | None:
    """Returns a socket with its address, and the folder of its own in which that is: the system's for temporary files,
    or in /tmp where the path would be too long for a socket. None if neither can have one."""
    for place in (None, "/tmp"):
        listener = socket.socket(socket.AF_UNIX)
        try:
            folder = tempfile.TemporaryDirectory(prefix="rlframe-", dir=place)
            try:
                listener.bind(address := f"{folder.name}/line")
            except OSError:
                folder.cleanup()
                raise
        except OSError:
            listener.close()
            continue
        return folder, listener, address
    return None


def messages(connection: socket.socket) -> Iterator[bytes]:
    """Yields what arrives, until the other end is gone."""
    # An end that is gone with answers unread resets the connection.
    with connection.makefile("rb") as file, suppress(ConnectionResetError):
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            if len(body := file.read(length)) < length:
                return
            yield body


def send(connection: socket.socket, body: bytes) -> None:
    """Sends a message. A connection whose other end is gone loses it."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(LENGTH.pack(len(body)) + body)


def wanted_in(message: bytes) -> list[Wanted]:
    """Returns what a message asks to take."""
    return [tuple(each) for each in json.loads(message)]


class Line:
    """The engine's end, in its asyncio loop. One call at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._one_call = asyncio.Lock()

    @classmethod
    async def to(cls, address: str) -> "Line":
        """Connects to the worker that answers at `address`."""
        return cls(*await asyncio.open_unix_connection(address))

    async def ask(self, what: bytes, message: bytes) -> bytes:
        """Returns the worker's answer.

        Raises:
            OSError, asyncio.IncompleteReadError: the worker is gone.
        """
        async with self._one_call:
            try:
                self._writer.write(LENGTH.pack(len(what) + len(message)) + what + message)
                await self._writer.drain()
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                return await self._reader.readexactly(length)
            except BaseException:
                # The next call would otherwise read the answer of one that was cancelled.
                self.close()
                raise

    def close(self) -> None:
        """Ends the worker's thread."""
        self._writer.close()


def by_line(line: Line, call: Callable[[list[Wanted]], Awaitable[list[bytes]]]) -> Take:
    """Returns a function that takes by the line, or by vLLM's own `call` as soon as the line is broken. If the worker
    has died, the error of that call says so."""
    unbroken: Line | None = line

    async def take(wanted: list[Wanted]) -> list[bytes]:
        nonlocal unbroken
        if unbroken is not None:
            try:
                return [await unbroken.ask(TAKE, json.dumps(wanted).encode())]
            except (OSError, asyncio.IncompleteReadError) as error:
                logger.warning("vLLM's worker answers no more beside its steps: %r", error)
                unbroken = None
        return await call(wanted)

    return take


async def called(lines: Sequence[Line], calls: Sequence[bytes]) -> list[bytes] | None:
    """Makes a call in each worker, and returns the answers. None if one of them must be made by vLLM: a worker is gone,
    or does not answer the call beside its steps.

    Args:
        lines: by rank.
        calls: by rank.
    """
    try:
        answers = await asyncio.gather(*(line.ask(CALL, call) for line, call in zip(lines, calls, strict=True)))
    except (OSError, asyncio.IncompleteReadError) as error:
        logger.warning("a worker of vLLM answers no more beside its steps: %r", error)
        return None
    return answers if all(answers) else None
