"""The renderer: opens a conversation, reads what the policy sampled, and continues with the next turn.

A further turn is what the chat template writes after the assistant's turn. To find it for any template, the assistant's
words are replaced by a sentinel: what stands behind it is the end of the turn, which the policy sampled or did not, and
the text to append. It is cut at the token that ends the turn, over which no tokenizer joins characters.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from jaxtyping import Int32

from rlframe.attempts.rendering.config import History, RenderingConfig
from rlframe.attempts.rendering.formats.base import Format, NoCalls
from rlframe.attempts.rendering.forms import format_of, style_of
from rlframe.attempts.rendering.reasoning import Channels, Tags
from rlframe.attempts.rendering.reply import Call, Malformed, Part, Reply, fault_of, id_of
from rlframe.attempts.rendering.sampled import decode, text_of, without_end
from rlframe.attempts.rendering.tail import Tail, check_all_are_written, tail_after
from rlframe.data.config import DataConfig
from rlframe.data.text.chat import encode, render
from rlframe.data.text.special_tokens import Rendering, marked, special_tokens, strings
from rlframe.data.text.template import text_of_template
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError, SettingError

Ids = Int32[np.ndarray, " L"]
PROMPT_TOKENS = 32
"""Number of tokens at the end of a prompt in which a template can begin reasoning."""
SHOWN = 40
"""Number of characters of a difference that a message shows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fork:
    """The conversation goes on as a further sequence, because the template writes earlier turns differently."""

    token_ids: Ids
    """[L] the whole conversation as the template writes it, with an opened turn of the assistant."""
    why: str
    """A sentence with the first difference."""


class Renderer:
    """Turns messages into tokens and sampled tokens into messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: RenderingConfig,
        *,
        data: DataConfig,
        end_token_ids: Collection[int] = (),
    ):
        """
        Args:
            data: settings with which prompts are rendered.
            end_token_ids: tokens at which engines end a turn. Those count that no tokenizer joins with other text.

        Raises:
            SettingError: the template does not tell the form of reasoning.
        """
        self._tokenizer, self._settings, self._data = tokenizer, settings, data
        self._template = text_of_template(tokenizer)
        self._chosen = format_of(settings, self._template)
        self._style = style_of(settings, self._template)
        # Without tools there are no calls to read.
        self._format: Format = NoCalls() if isinstance(self._chosen, SettingError) else self._chosen
        inside = {*self._format.markers, *(self._style.markers if self._style else ())}
        added = tokenizer.added_tokens_decoder
        ends = special_tokens(tokenizer) | {added[each].content: each for each in end_token_ids if each in added}
        self._ends = {token: ends[token] for token in sorted(ends, key=len, reverse=True) if token not in inside}

        self._proved: set[str] = set()
        """Ends of turns at which the tokenizer was seen to read a conversation in parts as it reads the whole."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Ids:
        """Returns the tokens of a conversation with an opened turn of the assistant at its end.

        Raises:
            DataError: the template refuses the conversation; see `render`.
            SettingError: there are tools, and the template does not tell the form of calls.
        """
        self._check_form(tools)
        return self._encode(self._render(messages, tools, opened=True))

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[Tool] = (), *, prompt: Sequence[int] | None = None
    ) -> Reply:
        """Returns a sampled turn as a message. Whatever was sampled, this is no error.

        Args:
            token_ids: the turn, with the token that ended it or without.
            tools: the offered tools.
            prompt: tokens that the turn continues, or the last of them. They tell whether the template has begun the
                reasoning; None stands for a conversation that a user's message ends.
        """
        ids = [int(one) for one in token_ids]
        if prompt is None:
            is_open = self._opens_reasoning
        else:
            last = [int(one) for one in prompt[-PROMPT_TOKENS:]]
            is_open = self._style is not None and self._style.is_open(decode(last, self._tokenizer))
        return self._parse(ids, tools, is_open=is_open)

    def follow(
        self,
        before: Sequence[Message],
        sampled: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        reply: Reply | None = None,
    ) -> Ids | Fork:
        """Returns the tokens to append after a sampled turn: the rest of its end, the new messages, and an opened turn
        of the assistant. With `history=fork`, a Fork if the template would write what came before differently.

        Args:
            before: the messages that the sampled turn answered.
            sampled: the turn, with the token that ended it or without.
            new: the messages that follow the turn.
            tools: the offered tools.
            reply: what `parse` made of the turn, if it need not be parsed again.

        Raises:
            DataError: the template refuses the conversation or leaves a message out, or ends a turn with no special
                token.
            SettingError: there are tools, and the template does not tell the form of calls.
        """
        self._check_form(tools)
        ids = [int(one) for one in sampled]
        forks = self._settings.history is History.FORK
        opened = self._render(before, tools, opened=True) if forks or reply is None else None
        if reply is None:
            assert opened is not None
            is_open = self._style is not None and self._style.is_open(opened.text)
            reply = self._parse(ids, tools, is_open=is_open)
        message = reply.message
        tail = self._tail(before, message, new, tools)
        check_all_are_written(new, tail.rest, where="the messages after a turn")
        if forks:
            assert opened is not None
            fork = self._fork(before, ids, message, new, tools, opened)
            if fork is not None:
                return fork
        return self._appended(ids, tail)

    def _appended(self, ids: Sequence[int], tail: Tail) -> Ids:
        """Returns the tokens of the tail, without its first one if the policy sampled it or one in its place."""
        (appended,) = encode(self._tokenizer, [tail.rest])
        if tail.end not in self._proved:
            (whole,) = encode(self._tokenizer, [tail.full])
            if appended[:1] != [self._ends[tail.end]] or whole[-len(appended) :] != appended:
                raise DataError(
                    f"the tokenizer reads what follows {tail.end!r}, which ends a turn, otherwise than within a whole "
                    "conversation, so that turns cannot be appended to what was sampled"
                )
            self._proved.add(tail.end)
        if ids and ids[-1] in {self._ends[token] for token in tail.ends}:
            return np.array(appended[1:], dtype=np.int32)
        # Sampled text is not joined with the white space that follows it.
        (space,) = encode(self._tokenizer, [replace(tail.rest, marked=tail.space)]) if tail.space else ([],)
        return np.array([*space, *appended], dtype=np.int32)

    def _check_form(self, tools: Sequence[Tool]) -> None:
        if tools and isinstance(self._chosen, SettingError):
            raise self._chosen

    @cached_property
    def _opens_reasoning(self) -> bool:
        """Returns whether the template begins the reasoning after a user's message."""
        if self._style is None:
            return False
        try:
            text = self._render([{"role": "user", "content": "x"}], (), opened=True).text
        except DataError:
            return False
        return self._style.is_open(text)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool) -> Rendering:
        written = [self._as_read(message) for message in messages]
        where = "a conversation"
        return render(self._tokenizer, written, config=self._data, generation_prompt=opened, where=where, tools=tools)

    def _as_read(self, message: Message) -> Message:
        """Returns the message with its reasoning where the template reads it."""
        reasoning = message.get("reasoning_content")
        if not reasoning or self._style is None:
            return message
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        if isinstance(self._style, Channels):
            if not message.get("tool_calls"):
                return {**rest, "thinking": reasoning}
            # It takes either reasoning or content beside a call.
            thoughts = [text for text in (reasoning, message["content"]) if text]
            return {**rest, "thinking": "\n\n".join(thoughts), "content": ""}
        if isinstance(self._style, Tags) and self._style.closing not in self._template:
            style = self._style
            begun = f"{style.opening}{style.label}\n{reasoning}\n{style.closing}\n\n"
            return {**rest, "content": begun + message["content"]}
        return message

    def _encode(self, rendering: Rendering) -> Ids:
        (ids,) = encode(self._tokenizer, [rendering])
        return np.array(ids, dtype=np.int32)

    def _parse(self, ids: list[int], tools: Sequence[Tool], *, is_open: bool) -> Reply:
        turn = text_of(without_end(ids, set(self._ends.values())), self._tokenizer)
        offered = {tool["function"]["name"]: tool for tool in tools}
        reasoning, rest = "", turn.marked
        if self._style is not None:
            thought = self._style.split(turn.marked, is_open=is_open)
            reasoning, rest = thought.reasoning, thought.rest
        parts = self._format.parts(rest, offered) if offered else self._format.plain(rest)
        reply = _reply(parts, reasoning, turn, ids, offered)
        if "tool_calls" in reply.message and (refusal := self._refusal(reply.message, tools)):
            why = f"the chat template cannot write this turn: {refusal.__cause__ or refusal!s:.200}"
            return _reply([Call(text=rest, fault=why)], reasoning, turn, ids, offered)
        return reply

    def _refusal(self, message: Message, tools: Sequence[Tool]) -> DataError | None:
        """Returns the error with which the template refuses a turn, if it does not refuse every turn."""
        user, refusal = {"role": "user", "content": "x"}, None
        for offered in ((), tools):
            try:
                self._render([user, message], offered, opened=False)
                return None
            except DataError as error:
                refusal = error
        try:
            self._render([user, {"role": "assistant", "content": "x"}], (), opened=False)
        except DataError:
            # It wants more of a conversation than is known here.
            return None
        return refusal

    def _tail(self, before: Sequence[Message], message: Message, new: Sequence[Message], tools: Sequence[Tool]) -> Tail:
        """Returns what the template writes after the assistant's turn."""
        texts = list(strings([list(before), list(new), list(tools), message]))
        free = next(number for number in count() if not any(f"Turn{number}x" in text for text in texts))
        sentinel = f"Turn{free}x"
        stand_in = _stand_in(message, sentinel)
        written = [*before, stand_in]
        full = self._render([*written, *new], tools, opened=True)
        closed = self._render(written, tools, opened=False)
        return tail_after(sentinel, full=full, closed=closed, ends=tuple(self._ends))

    def _fork(
        self,
        before: Sequence[Message],
        ids: list[int],
        message: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        opened: Rendering,
    ) -> Fork | None:
        """Returns the conversation as the template writes it, if that differs from what came before."""
        try:
            full = self._render([*before, message, *new], tools, opened=True)
            closed = self._render([*before, message], tools, opened=False)
        except DataError:
            # No template would be given this turn, for example an empty one.
            return None
        said = text_of(without_end(ids, set(self._ends.values())), self._tokenizer).text
        if full.text.startswith(opened.text + said):
            return None
        turn = closed.text.rstrip()
        end = next((token for token in self._ends if turn.endswith(token)), "")
        turn = turn.removesuffix(end)
        if turn.startswith(opened.text.rstrip()) and full.text.startswith(turn):
            return None
        expected = turn if turn.startswith(opened.text.rstrip()) else opened.text + said
        return Fork(token_ids=self._encode(full), why=_difference(expected, full.text))


def _reply(parts: Sequence[Part], reasoning: str, turn: Rendering, ids: Sequence[int], tools: dict[str, Tool]) -> Reply:
    """Returns the message of a turn's parts, marks replaced. Calls that cannot be made stay in the content."""
    tokens = dict(turn.marks)

    def unmarked(value: Any) -> Any:
        return marked(value, tokens) if tokens else value

    content, calls, malformed = [], [], []
    for part in parts:
        if isinstance(part, str):
            content.append(unmarked(part))
            continue
        call = replace(part, **{name: unmarked(getattr(part, name)) for name in ("text", "name", "arguments", "fault")})
        if fault := fault_of(call, tools):
            malformed.append(Malformed(text=call.text, why=fault))
            content.append(call.text)
        else:
            own = call.id if isinstance(call.id, str) and call.id else id_of(ids, len(calls))
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": own, "type": "function", "function": function})
    message: Message = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        message["reasoning_content"] = unmarked(reasoning)
    if calls:
        message["tool_calls"] = calls
    return Reply(message=message, malformed=tuple(malformed))


def _stand_in(message: Message, sentinel: str) -> Message:
    """Returns a message like `message` whose last words are the sentinel."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": sentinel}
    last = calls[-1]
    function = {**last["function"], "arguments": {"argument": sentinel}}
    return {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], {**last, "function": function}]}


def _difference(expected: str, found: str) -> str:
    pairs = enumerate(zip(expected, found, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(expected), len(found)))
    window = slice(max(0, at - SHOWN // 4), at + SHOWN)
    return f"the chat template writes earlier turns differently: {expected[window]!r} would now be {found[window]!r}"
