"""The server of endpoints: its start."""

import asyncio
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
