"""The HTTP server of the endpoints of all attempts of a runner."""

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from aiohttp import web

from rlframe.attempts.endpoint import chat, responses
from rlframe.attempts.endpoint.asked import Refused, parsed
from rlframe.attempts.endpoint.desk import Desk, over
from rlframe.environments.base import Endpoint

LARGEST_BODY_BYTES = 1 << 26
SHUTDOWN_S = 1.0
"""Seconds that connections get to end when the server closes."""


class Server:
    """Listens on one address, at any free port, from the first attempt on. An attempt has a path of its own, and a key
    that is computed from the number of the attempt and a secret, so that nothing is kept of attempts that are over."""

    def __init__(self, host: str):
        self._host, self._secret = host, secrets.token_bytes(32)
        self._desks: dict[int, Desk] = {}
        self._last = 0
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._started: asyncio.Task[None] | None = None

    async def open(self, desk: Desk, *, seed: int) -> tuple[int, Endpoint]:
        """Returns the number and the endpoint of an attempt, whose calls `desk` answers until `close`.

        Raises:
            OSError: the server cannot listen. The next attempt tries again.
        """
        if self._started is None or (self._started.done() and self._started.exception()):
            self._started = asyncio.get_running_loop().create_task(self._start())
        # The others wait for it too if this attempt is cancelled.
        await asyncio.shield(self._started)
        self._last += 1
        self._desks[self._last] = desk
        url = f"http://{_in_url(self._host)}:{self._port}/attempts/{self._last}/v1"
        return self._last, Endpoint(url=url, key=self._key(self._last), seed=seed)

    def close(self, number: int) -> None:
        """Ends an endpoint."""
        del self._desks[number]

    async def stop(self) -> None:
        """Ends the server."""
        if self._started is not None:
            await asyncio.wait([self._started])
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        application = web.Application(client_max_size=LARGEST_BODY_BYTES, middlewares=[_as_the_api_says])
        application.router.add_post("/attempts/{number}/v1/chat/completions", self._answering(chat))
        application.router.add_post("/attempts/{number}/v1/responses", self._answering(responses))
        application.router.add_get("/attempts/{number}/v1/models", self._models)
        application.router.add_get("/attempts/{number}/v1/models/{model:.+}", self._model)
        if self._runner is not None:
            await self._runner.cleanup()
        # A call whose agent has gone is aborted.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        # Not by asyncio, which goes on without a socket where none can be made.
        listening = socket.create_server((self._host, 0), family=_family(self._host))
        await web.SockSite(self._runner, listening).start()
        self._port = listening.getsockname()[1]

    def _key(self, number: int) -> str:
        return "rlframe-" + hmac.new(self._secret, str(number).encode(), hashlib.sha256).hexdigest()

    def _desk(self, request: web.Request) -> Desk:
        """Returns the desk of the attempt that a request belongs to.

        Raises:
            Refused: the key is not the attempt's, or the attempt is over.
        """
        number = request.match_info["number"]
        known = number.isascii() and number.isdigit() and len(number) < 20
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else ""
        expected = self._key(int(number)) if known else ""
        if not known or not hmac.compare_digest(given.encode(errors="replace"), expected.encode()):
            raise Refused("the key is not that of this attempt", status=401, code="invalid_api_key")
        if int(number) not in self._desks:
            raise over()
        return self._desks[int(number)]

    def _answering(self, api: ModuleType) -> Callable[[web.Request], Any]:
        """Returns what answers requests of one form of the API."""

        async def answering(request: web.Request) -> web.StreamResponse:
            desk = self._desk(request)
            try:
                body = parsed(await _read(request))
                asked = api.read(body)
            except Refused:
                desk.refuse()
                raise
            said = await desk.answer(asked)
            if asked.stream:
                return await _streamed(request, api.events(said, body))
            return web.json_response(api.answer(said, body))

        return answering

    async def _models(self, request: web.Request) -> web.Response:
        self._desk(request)
        return web.json_response({"object": "list", "data": [_described("policy")]})

    async def _model(self, request: web.Request) -> web.Response:
        self._desk(request)
        return web.json_response(_described(request.match_info["model"]))


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "rlframe"}


async def _read(request: web.Request) -> bytes:
    """Returns the body of a request.

    Raises:
        Refused: it cannot be decompressed.
    """
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise Refused(f"the body of the request cannot be read: {error}") from None


async def _streamed(request: web.Request, events: Iterator[tuple[str, Mapping[str, Any] | str]]) -> web.StreamResponse:
    """Sends events. They begin when all is sampled: an error before that has a status of its own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        line = f"event: {name}\n" if name else ""
        await response.write(f"{line}data: {text}\n\n".encode())
    await response.write_eof()
    return response


@web.middleware
async def _as_the_api_says(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Answers errors in the form of the API."""
    try:
        return await handler(request)
    except Refused as refusal:
        return web.json_response(refusal.body, status=refusal.status)
    except web.HTTPException as error:
        told = f"{request.method} {request.path} is not served: {error.reason}"
        return web.json_response(Refused(told, status=error.status).body, status=error.status)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
