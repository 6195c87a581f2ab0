"""Converts the turns of a conversation to tokens, and marks the learned ones."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from jaxtyping import Float32, Int32

from rlframe.data.config import DataConfig
from rlframe.data.text.chat import encode, end_by_next_turn, render
from rlframe.data.text.reasoning import as_read, check_is_written, is_left_out, remedies
from rlframe.data.text.special_tokens import Rendering, special_tokens
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError

TAGS = re.compile("</?think>")
"""Tags of reasoning in a content, which templates write as theirs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """One sequence of tokens, with the weight of each in the loss.

    Example: user says 7 8, assistant 5, with 1 and 3 opening their turns and 2 ending them: token_ids [1, 7, 8, 2, 3,
    5, 2], weights [0, 0, 0, 0, 0, 1, 1]
    """

    token_ids: Int32[np.ndarray, " L"]
    """[L] tokens."""
    weights: Float32[np.ndarray, " L"]
    """[L] 0.0 where a token is not in the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A conversation as sequences of tokens."""

    sequences: tuple[Tokens, ...]
    """Sequences in the order of their turns: several where the template rewrites earlier turns. Each turn is learned in
    one of them."""
    reasoning_left_out: int
    """Number of turns that are not learned and whose reasoning the template leaves out, as it does when the model is
    served."""

    def single(self, *, where: str, what: str) -> Tokens:
        """Returns the only sequence.

        Raises:
            DataError: there are several, and `what` must be one.
        """
        if len(self.sequences) == 1:
            return self.sequences[0]
        raise DataError(
            f"{where}: expected {what} to be one sequence, found {len(self.sequences)}: the chat template rewrites "
            "earlier turns of the assistant, for example without their reasoning; let one turn of the assistant be "
            "learned, or set data.chat_template to a template that keeps them"
        )


def encode_turns(
    messages: Sequence[Message],
    weights: Sequence[float],
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    where: str,
    tools: Sequence[Tool] = (),
) -> Encoded:
    """Returns the conversation's tokens up to the end of the last turn with a weight, each such turn's tokens with its
    weight, as the template serves it.

    A turn is what the conversation up to it has beyond the rendering of all turns before it with an opened assistant
    turn, up to and with the token that ends it: that of the next turn if the template writes none of its own. Where the
    rendering of the turns before it does not begin with what the sequence has so far, because the template rewrites
    earlier turns, a further sequence begins.

    Args:
        weights: one per message, 0.0 on messages that are not the assistant's; at least one is above 0.

    Raises:
        DataError: names `where`: a conversation whose first turn is learned, or a template that refuses it, does not
            read its reasoning, leaves out what is learned, or opens a turn otherwise than it writes it.
    """
    turns = [index for index, weight in enumerate(weights) if weight]
    assert turns and all(messages[index]["role"] == "assistant" for index in turns)
    if turns[0] == 0:
        raise DataError(
            f"{where}: expected a message before the first turn that is learned, found that the conversation begins "
            "with it; put the user's or a system message before it, or give it the weight 0"
        )
    given = as_read(messages, tokenizer, where=where)
    rendered = partial(render, tokenizer, config=config, where=where, tools=tools)
    texts: list[Rendering] = []
    for index in turns:
        texts.append(rendered(given[:index], generation_prompt=True))
        texts.append(rendered(given[: index + 1], generation_prompt=False))
        turn = _beyond(*texts[-2:])
        check_is_written(messages[index], turn, texts[-1])
        if turn:
            texts[-1] = _ended(texts[-1], messages, index, tokenizer=tokenizer, config=config)
    prefixes = encode(tokenizer, texts)
    sequences: list[_Sequence] = []
    for place, index in enumerate(turns):
        (opened, closed), pair = prefixes[2 * place : 2 * place + 2], texts[2 * place : 2 * place + 2]
        if closed[: len(opened)] != opened:
            raise DataError(f"{where}: {_first_difference(opened, closed, tokenizer)}")
        _check_content(messages[index], _beyond(*pair), where=where)
        if not sequences or not sequences[-1].is_continued_by(opened):
            sequences.append(_Sequence())
        end = end_of_turn(closed, start=len(opened), tokenizer=tokenizer)
        sequences[-1].add(closed[:end], start=len(opened), weight=weights[index])
    context = [messages[index] for index in range(turns[-1]) if not weights[index]]
    return Encoded(
        sequences=tuple(sequence.tokens() for sequence in sequences),
        reasoning_left_out=sum(is_left_out(message, texts[-1].text) for message in context),
    )


@dataclass(kw_only=True, slots=True)
class _Sequence:
    """A sequence that grows by turns."""

    token_ids: list[int] = field(default_factory=list)
    learned: list[tuple[int, int, float]] = field(default_factory=list)
    """Start, end and weight of each turn that is learned."""

    def is_continued_by(self, token_ids: list[int]) -> bool:
        """Returns whether a rendering begins with this sequence."""
        return token_ids[: len(self.token_ids)] == self.token_ids

    def add(self, token_ids: list[int], *, start: int, weight: float) -> None:
        """Extends the sequence to `token_ids`, of which a turn begins at `start`."""
        self.token_ids = token_ids
        self.learned.append((start, len(token_ids), weight))

    def tokens(self) -> Tokens:
        """Returns the tokens with their weights. Nothing predicts the first one."""
        weights = np.zeros(len(self.token_ids), dtype=np.float32)
        for start, end, weight in self.learned:
            weights[start:end] = weight
        weights[0] = 0.0
        return Tokens(token_ids=np.array(self.token_ids, dtype=np.int32), weights=weights)


def _ended(
    closed: Rendering,
    messages: Sequence[Message],
    index: int,
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
) -> Rendering:
    """Returns the conversation up to a turn of the assistant with the special token that ends it: where the template
    writes none, the first one of the turn that follows, or that would."""
    text = closed.marked.rstrip()
    if any(text.endswith(token) for token in special_tokens(tokenizer)):
        return closed
    role = messages[index + 1]["role"] if index + 1 < len(messages) else ""
    if role not in ("user", "tool"):
        role = "tool" if "tool_calls" in messages[index] else "user"
    return replace(closed, marked=closed.marked + end_by_next_turn(tokenizer, config, role=role))


def _check_content(message: Message, turn: str, *, where: str) -> None:
    """Raises DataError if the template leaves out a part of what a turn that is learned says, as some do beside calls.

    Args:
        turn: what the template writes for the turn. One that is empty is counted as it has nothing to learn.
    """
    written = "".join(turn.split())
    for part in TAGS.split(message["content"]):
        if written and "".join(part.split()) not in written:
            raise DataError(
                f"{where}: the chat template leaves out {part.strip()!r:.60}, content of a turn that is learned; give "
                "that message the weight 0, remove the text, or set data.chat_template to a template that writes it"
            )


def _beyond(opened: Rendering, closed: Rendering) -> str:
    """Returns what a rendering has beyond another; the whole if it does not begin with it."""
    return closed.text.removeprefix(opened.text)


def end_of_turn(token_ids: list[int], *, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns one past the turn's last special token, if only white space follows it; else the end of the tokens.

    Templates such as Qwen's put a newline after the end-of-turn token. Generation stops before it, so it is not learnt.
    """
    special = set(special_tokens(tokenizer).values())
    last = max((index for index in range(start, len(token_ids)) if token_ids[index] in special), default=None)
    if last is None or str(tokenizer.decode(token_ids[last + 1 :])).strip():
        return len(token_ids)
    return last + 1


def _first_difference(opened: list[int], closed: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    pairs = enumerate(zip(opened, closed, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(opened), len(closed)))
    window = slice(max(0, at - 4), at + 5)
    return (
        "the chat template opens a turn of the assistant otherwise than it writes it, so that its tokens cannot be "
        f"told apart: at token {at} the prompt of the turn reads {tokenizer.decode(opened[window])!r}, and with the "
        f"turn the conversation reads {tokenizer.decode(closed[window])!r}; {remedies(tokenizer)}"
    )
