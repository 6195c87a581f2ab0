"""Chats with a language model: a conversation there, a text back."""

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from rlframe.types.messages import Message
from rlframe.utils.bounds import Range, Seconds, check_bounds
from rlframe.utils.errors import RewardError, SettingError

if TYPE_CHECKING:
    import aiohttp

LARGEST_ANSWER_BYTES = 1 << 22
LONGEST_WAIT_S = 60.0
"""Greatest number of seconds between two tries."""
SHOWN_CHARACTERS = 200
"""Characters of a server's words in messages."""


class Silence(StrEnum):
    """Reasons for which a model says nothing."""

    TIMED_OUT = "timed_out"
    """It took too long, each time it was asked."""
    UNREACHABLE = "unreachable"
    """No connection, or the server failed or was too busy, each time it was asked."""
    REFUSED = "refused"
    """The server refused the request: a wrong key, an unknown model, too long a prompt."""


class NoReply(Exception):
    """Raised if a model says nothing."""

    def __init__(self, reason: Silence, why: str):
        super().__init__(why)
        self.reason = reason


class Chat(ABC):
    """A model that can be talked to."""

    @abstractmethod
    async def say(self, messages: Sequence[Message]) -> str:
        """Returns the model's reply to a conversation.

        Raises:
            NoReply: there is none.
        """

    async def close(self) -> None:  # noqa: B027 - some hold nothing
        """Releases connections."""


@dataclass(kw_only=True, slots=True)
class ChatEndpointConfig:
    """Settings of an endpoint that speaks OpenAI's protocol of chat completions."""

    base_url: str
    """Address up to and including the version, such as http://127.0.0.1:8000/v1. `/chat/completions` is added."""
    model: str
    """Name of the model in requests."""
    api_key_variable: str = ""
    """Name of the environment variable with the key, which is sent as a bearer token. Empty sends none."""
    temperature: Annotated[float, Range(0, 100)] | None = 0.0
    """Temperature of the reply. null sends none, for models that have their own."""
    max_tokens: Annotated[int, Range(1, 1 << 24)] | None = 1024
    """Greatest number of tokens of the reply. null sends none: OpenAI's reasoning models refuse the field, and take
    `max_completion_tokens` in `extra`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as `{reasoning_effort: low}`."""
    request_timeout_s: Seconds = 60.0
    """Seconds that one request may take."""
    retries: Annotated[int, Range(0, 100)] = 3
    """Number of further requests after one that failed for a reason that may pass: no connection, no answer in time, a
    server's error, too many requests."""
    retry_wait_s: Seconds = 1.0
    """Seconds before the first further request. Each time twice as many, or as many as the server asks for; at most
    60."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.base_url.startswith(("http://", "https://")):
            raise SettingError("base_url", "must begin with http:// or https://", got=repr(self.base_url))
        if not self.model:
            raise SettingError("model", "must name a model", got="''")
        if taken := sorted(set(self.extra) & {"model", "messages", "temperature", "max_tokens", "stream"}):
            raise SettingError("extra", "must not have fields with a setting of their own", got=", ".join(taken))


class ChatEndpoint(Chat):
    """A server that speaks OpenAI's protocol."""

    def __init__(self, config: ChatEndpointConfig):
        """Raises RewardError if the variable of the key is not set."""
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {}
        if name := config.api_key_variable:
            if not (key := os.environ.get(name)):
                raise RewardError(f"endpoint.api_key_variable={name}: no such environment variable is set")
            self._headers = {"Authorization": f"Bearer {key}"}

    async def say(self, messages: Sequence[Message]) -> str:
        """See Chat."""
        wait_s, left = self._config.retry_wait_s, self._config.retries
        while True:
            try:
                return await self._ask(messages)
            except _MayPass as error:
                if not left:
                    raise NoReply(error.reason, str(error)) from None
                await asyncio.sleep(min(max(wait_s, error.after_s), LONGEST_WAIT_S))
                wait_s, left = 2 * wait_s, left - 1

    async def close(self) -> None:
        """See Chat."""
        if self._session:
            await self._session.close()

    async def _ask(self, messages: Sequence[Message]) -> str:
        """Sends one request."""
        # Optional: the extra `agents`.
        import aiohttp

        config = self._config
        if self._session is None:
            # No limit of connections: who asks has one, and a wait for a connection would count as the server's time.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        settings = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        sent = {name: value for name, value in settings.items() if value is not None}
        content = {**config.extra, **sent, "model": config.model, "messages": list(messages)}
        limit = aiohttp.ClientTimeout(total=config.request_timeout_s)
        # A redirect could take the key elsewhere.
        request = self._session.post(
            f"{config.base_url.rstrip('/')}/chat/completions", json=content, timeout=limit, allow_redirects=False
        )
        try:
            async with request as response:
                body = await response.content.read(LARGEST_ANSWER_BYTES)
                while len(body) < LARGEST_ANSWER_BYTES and (more := await response.content.read(LARGEST_ANSWER_BYTES)):
                    body += more
                status, headers = response.status, response.headers
        except TimeoutError:
            raise _MayPass(Silence.TIMED_OUT, f"no answer within {config.request_timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise _MayPass(Silence.UNREACHABLE, f"{type(error).__name__}: {error}") from None
        return _reply(status, headers, body)


class _MayPass(Exception):
    """Raised if a request failed for a reason that may pass."""

    def __init__(self, reason: Silence, why: str, after_s: float = 0.0):
        super().__init__(why)
        self.reason, self.after_s = reason, after_s


def _reply(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Returns the text of an answer."""
    shown = f"status {status}: {body[:SHOWN_CHARACTERS].decode(errors='replace')}"
    if status in (408, 429) or status >= 500:
        after = headers.get("Retry-After", "")
        raise _MayPass(Silence.UNREACHABLE, shown, float(after) if after.isdigit() else 0.0)
    if status != 200:
        raise NoReply(Silence.REFUSED, shown)
    try:
        said = json.loads(body)["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise NoReply(Silence.REFUSED, f"no chat completion: {shown}") from None
    return said if isinstance(said, str) else ""
