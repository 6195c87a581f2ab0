"""The sequences of one attempt: which one a call goes on in, and the tokens with which it does.

A call that begins with the messages of an earlier call and the policy's answer to them goes on after the tokens that
were sampled: the renderer appends the new messages. Any other call begins a further sequence, rendered as a whole. So
does a second call that goes on after the same answer: its sequence begins with the same tokens, which are trained on
once, in the sequence that they were sampled in.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from rlframe.attempts.endpoint.asked import Asked, Refused
from rlframe.attempts.rendering.renderer import Fork, Renderer
from rlframe.attempts.rendering.reply import Reply
from rlframe.data.text.tool_calls import Tool
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, Rollout
from rlframe.types.turn import TurnRecord, shown_last, state_of_messages


@dataclass(kw_only=True, slots=True, eq=False)
class Strand:
    """One sequence, and when it was last gone on with."""

    rollout: Rollout
    last: int = 0
    """Number of the last response in it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answered:
    """A call that was answered."""

    sequence: Strand
    start: int
    """Position of the response's first token in the sequence."""
    end: int
    """Position after the response's last token."""
    messages: list[Message]
    """The conversation before the response, with the calls' own ids."""
    reply: Reply
    ids: dict[str, str]
    """The own id of each call of the conversation, by the one that the agent knows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """The place in which a call goes on."""

    messages: list[Message]
    """The conversation, with the calls' own ids."""
    token_ids: list[int]
    """The whole sequence with which the engine goes on."""
    after: Answered | None
    """The call that it goes on after. None begins a sequence."""
    ids: dict[str, str]
    tools: list[Tool]
    key: bytes
    """Stands for the tools and the conversation as the agent knows them."""
    ordinals: dict[str, int]
    """Number of each call of the conversation, by the id that the agent knows."""


@dataclass(slots=True)
class Conversation:
    """All calls of one attempt."""

    language: Renderer
    prompt: Prompt
    sample_index: int
    sequences: list[Strand] = field(default_factory=list)
    num_answered: int = 0
    _known: dict[bytes, list[Answered]] = field(default_factory=dict)
    """The answered calls by what stands for their tools, conversation and answer."""

    def place(self, asked: Asked) -> Place:
        """Returns where a call goes on.

        Raises:
            Refused: the conversation ends with the policy's words.
            DataError, SettingError: the chat template refuses the conversation.
        """
        if asked.messages[-1]["role"] == "assistant":
            raise Refused("the last message must not be the assistant's: it is the policy's turn", parameter="messages")
        keys, ordinals = _keys(asked.messages, asked.tools)
        for index in reversed(range(len(asked.messages))):
            new = asked.messages[index + 1 :]
            if asked.messages[index]["role"] != "assistant":
                continue
            if found := self._known.get(keys[index + 1]):
                return self._after(self._chosen(found), asked, new, keys[-1], ordinals)
            # Words that the policy did not say come after whatever it has said.
            break
        token_ids = self.language.open(asked.messages, asked.tools).tolist()
        return Place(
            messages=asked.messages,
            token_ids=token_ids,
            after=None,
            ids={},
            tools=asked.tools,
            key=keys[-1],
            ordinals=ordinals,
        )

    def _chosen(self, found: Sequence[Answered]) -> Answered:
        """Returns one of several calls with the same conversation and answer: one that nothing goes on after."""
        return next((each for each in found if _is_last(each)), found[0])

    def _after(
        self, answered: Answered, asked: Asked, new: list[Message], key: bytes, ordinals: dict[str, int]
    ) -> Place:
        sampled = answered.sequence.rollout.token_ids[answered.start : answered.end].tolist()
        theirs = asked.messages[len(asked.messages) - len(new) - 1]
        pairs = zip(theirs.get("tool_calls", ()), answered.reply.message.get("tool_calls", ()), strict=True)
        ids = answered.ids | {their["id"]: own["id"] for their, own in pairs if "id" in their}
        new = [_with_own_id(message, ids) for message in new]
        following = self.language.follow(answered.messages, sampled, new, asked.tools, reply=answered.reply)
        messages = [*answered.messages, answered.reply.message, *new]
        before = answered.sequence.rollout.token_ids[: answered.end].tolist()
        forks = isinstance(following, Fork)
        return Place(
            messages=messages,
            token_ids=following.token_ids.tolist() if forks else [*before, *following.tolist()],
            after=None if forks else answered,
            ids=ids,
            tools=asked.tools,
            key=key,
            ordinals=ordinals,
        )

    def add(self, place: Place, completions: Sequence[Completion], reply: Reply, *, told: Message) -> None:
        """Adds a response to the sequence in which its call goes on, or to a new one.

        Args:
            completions: the parts of the response, all but the last one interrupted.
            told: the response as the agent knows it.
        """
        after = place.after
        if after is not None and _is_last(after):
            sequence = after.sequence
            sequence.rollout.observe(place.token_ids[after.end :])
        else:
            # `prompt` is what the engine was given.
            sequence = Strand(rollout=Rollout.begin(self.prompt, self.sample_index))
            sequence.rollout.restart(ModelInput(np.array(place.token_ids)))
            self.sequences.append(sequence)
        start = sequence.rollout.num_tokens
        for completion in completions:
            sequence.rollout.append(completion)
        record = TurnRecord(
            finish_reason=str(completions[-1].finish_reason),
            malformed=tuple(each.why for each in reply.malformed),
            state=state_of_messages(shown_last(place.messages)),
        )
        sequence.rollout.records = (*sequence.rollout.records, record)
        self.num_answered += 1
        sequence.last = self.num_answered
        sequence.rollout.messages = [*place.messages, reply.message]
        answered = Answered(
            sequence=sequence,
            start=start,
            end=sequence.rollout.num_tokens,
            messages=place.messages,
            reply=reply,
            ids=place.ids,
        )
        self._known.setdefault(_next_key(place.key, told, place.ordinals), []).append(answered)

    def ordered(self) -> list[Rollout]:
        """Returns the sequences, the one with the last response last."""
        return [each.rollout for each in sorted(self.sequences, key=lambda each: each.last)]


def _is_last(answered: Answered) -> bool:
    """Returns whether nothing follows a response in its sequence."""
    return answered.end == answered.sequence.rollout.num_tokens


def _keys(messages: list[Message], tools: list[Tool]) -> tuple[list[bytes], dict[str, int]]:
    """Returns what stands for the tools, and for them with the first message, the first two, and so on, and the number
    of each call by its id."""
    ordinals: dict[str, int] = {}
    keys = [_digest(b"", tools)]
    for message in messages:
        keys.append(_next_key(keys[-1], message, ordinals))
    return keys, ordinals


def _next_key(key: bytes, message: Message, ordinals: dict[str, int]) -> bytes:
    """Returns what stands for a conversation with one more message. Ids are replaced by the order of the calls, and
    reasoning is left out, because agents need not send it back.

    Args:
        ordinals: the number of each call so far, by its id, to which those of the message are added.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        ordinals.setdefault(call.get("id", ""), len(ordinals))
        calls.append([call["function"]["name"], call["function"]["arguments"]])
    answers = ordinals.get(message.get("tool_call_id", ""), -1)
    return _digest(key, [message["role"], message["content"], calls, answers])


def _digest(key: bytes, value: Any) -> bytes:
    return blake2b(key + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _with_own_id(message: Message, ids: dict[str, str]) -> Message:
    """Returns a message with the id that the policy's call has, in the place of the one that the agent was told."""
    own = ids.get(message.get("tool_call_id", ""))
    return message if own is None else {**message, "tool_call_id": own}
