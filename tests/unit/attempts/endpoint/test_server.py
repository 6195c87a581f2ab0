"""The server of endpoints: its start."""

import asyncio
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rlframe.attempts.endpoint.server import Server


@pytest.mark.parametrize("ticks", range(1, 5))
def test_an_attempt_that_is_cancelled_while_the_server_starts_ends_itself_only(ticks: int) -> None:
    desk: Any = None

    async def run() -> str:
        server = Server("127.0.0.1")
        first = asyncio.create_task(server.open(desk, seed=0))
        for _ in range(ticks):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        try:
            _, endpoint = await server.open(desk, seed=0)
            port = int(endpoint.url.split(":")[2].split("/")[0])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
        finally:
            await server.stop()
        return endpoint.url

    assert ":0/" not in asyncio.run(run())


def test_a_server_that_could_not_listen_starts_with_a_later_attempt() -> None:
    desk: Any = None

    async def run() -> str:
        server = Server("127.0.0.1")
        try:
            with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
                await server.open(desk, seed=0)
            _, endpoint = await server.open(desk, seed=0)
        finally:
            await server.stop()
        return endpoint.url

    assert ":0/" not in asyncio.run(run())


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Lets this process open no file inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Files of other tests that are garbage would be closed inside the block.
    gc.collect()
    gc.disable()
    with ExitStack() as stack:
        stack.callback(gc.enable)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
