"""The conversation of the policy with a harness of the package `verifiers`: requests of completions there, messages
here. Imported where the package is installed."""

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import message_hash

from rlframe.environments.base import Turn
from rlframe.types.messages import Message

ENDPOINT = "environment=endpoint plays agents that do so"


class NotOneConversation(Exception):
    """Raised if requests are not one conversation that grows, which is what a session can play."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request for a completion."""

    messages: list[Message]
    """Messages that follow the policy's last response."""
    tools: list[dict[str, Any]]


class Conversation:
    """Requests, one after the other, each of which continues the one before."""

    def __init__(self) -> None:
        self.questions: asyncio.Queue[Question] = asyncio.Queue()
        self._said: list[str] = []
        """Hashes of the messages so far, the policy's last response included."""
        self._reply: asyncio.Future[Turn] | None = None
        self._names: dict[str, str] = {}
        """Name of the tool that each call has called, by the call's id."""

    async def ask(self, request: vf.Request) -> vf.Response:
        """Returns the policy's response to a request.

        Raises:
            NotOneConversation: it does not continue the conversation, or comes while another one waits.
        """
        if self._reply is not None:
            raise NotOneConversation(f"two requests for completions at the same time; {ENDPOINT}")
        hashes = [_hash(message) for message in request.messages]
        new = request.messages[len(self._said) :]
        if hashes[: len(self._said)] != self._said or not new:
            raise NotOneConversation(
                f"a request does not continue the conversation: its history is another one; {ENDPOINT}"
            )
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in request.tools or []
        ]
        self._reply = asyncio.get_running_loop().create_future()
        self.questions.put_nowait(Question(messages=[self._read(message) for message in new], tools=tools))
        try:
            turn = await self._reply
        finally:
            self._reply = None
        message = self._written(turn)
        self._said = [*hashes, _hash(message)]
        return vf.Response(
            id=uuid.uuid4().hex,
            created=0,
            model="policy",
            message=message,
            finish_reason="tool_calls" if message.tool_calls else "stop",
        )

    def reply(self, turn: Turn) -> None:
        """Answers the request that waits."""
        assert self._reply is not None, "no request waits"
        self._reply.set_result(turn)

    def _read(self, message: vf.Message) -> Message:
        """Returns a message of a request as the policy sees it."""
        if not isinstance(message.content, str | None):
            raise NotOneConversation("a message has images, which rlframe does not support")
        found: Message = {"role": message.role, "content": message.content or ""}
        if isinstance(message, vf.ToolMessage):
            name = message.name or self._names.get(message.tool_call_id)
            return found | {"tool_call_id": message.tool_call_id} | ({"name": name} if name else {})
        if isinstance(message, vf.AssistantMessage) and message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        return found

    def _written(self, turn: Turn) -> vf.AssistantMessage:
        """Returns the policy's response as a message of the package."""
        calls = [self._call(call) for call in turn.message.get("tool_calls", [])]
        return vf.AssistantMessage(
            content=turn.message["content"],
            reasoning_content=turn.message.get("reasoning_content"),
            tool_calls=calls or None,
        )

    def _call(self, call: Mapping[str, Any]) -> vf.ToolCall:
        function = call["function"]
        identity = call.get("id") or f"call_{len(self._names)}"
        self._names[identity] = function["name"]
        return vf.ToolCall(id=identity, name=function["name"], arguments=json.dumps(function["arguments"]))


def _hash(message: vf.Message) -> str:
    """Returns a hash of what a message says. Harnesses may leave out reasoning when they repeat a response."""
    if isinstance(message, vf.AssistantMessage):
        message = message.model_copy(update={"reasoning_content": None, "provider_state": None})
    return message_hash(message)
