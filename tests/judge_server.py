"""A server that speaks OpenAI's protocol of chat completions, whose words a function decides."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Server:
    """The server, and what it was asked."""

    answer: Callable[[dict[str, Any]], Any]
    """Gets the request. Returns the reply, a web.Response, or an awaitable of one of them."""
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    now: int = 0
    """Requests under way."""
    most: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        content = await request.json()
        self.asked.append(content)
        self.headers.append(dict(request.headers))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            said = self.answer(content)
            if asyncio.iscoroutine(said):
                said = await said
        finally:
            self.now -= 1
        if isinstance(said, web.StreamResponse):
            return said
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": said}}]})


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Any]) -> Iterator[Server]:
    """Serves on a free port of this machine until the block ends."""
    server, loop = Server(answer), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", server.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
