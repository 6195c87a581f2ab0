"""Converts the turns of a conversation to tokens, and marks the learned ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from rlframe.data.config import DataConfig
from rlframe.data.text.chat import encode, render
from rlframe.data.text.special_tokens import Rendering, special_tokens
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message
from rlframe.utils.errors import DataError


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


def encode_turns(
    messages: Sequence[Message],
    weights: Sequence[float],
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    where: str,
    tools: Sequence[Tool] = (),
) -> Tokens:
    """Returns the conversation's tokens up to the end of the last turn with a weight, each such turn's tokens with its
    weight.

    A turn is what the whole conversation has beyond the rendering of all turns before it with an opened assistant turn,
    up to and with the token that ends it. That holds only for templates in which each rendering is a token prefix of
    the next: it is checked.

    Args:
        weights: one per message, 0.0 on messages that are not the assistant's; at least one is above 0.

    Raises:
        DataError: names `where`: a template that refuses the conversation or rewrites earlier turns.
    """
    turns = [index for index, weight in enumerate(weights) if weight]
    assert turns and all(messages[index]["role"] == "assistant" for index in turns)
    rendered = partial(render, tokenizer, config=config, where=where, tools=tools)
    texts: list[Rendering] = []
    for index in turns:
        texts.append(rendered(messages[:index], generation_prompt=True))
        texts.append(rendered(messages[: index + 1], generation_prompt=False))
    prefixes = encode(tokenizer, texts)
    for earlier, later in zip(prefixes, prefixes[1:], strict=False):
        if later[: len(earlier)] != earlier:
            raise DataError(f"{where}: {_first_difference(earlier, later, tokenizer)}")
    token_weights = np.zeros(len(prefixes[-1]), dtype=np.float32)
    end = 0
    for index, opened, closed in zip(turns, prefixes[0::2], prefixes[1::2], strict=True):
        end = end_of_turn(closed, start=len(opened), tokenizer=tokenizer)
        token_weights[len(opened) : end] = weights[index]
    token_weights[0] = 0.0
    return Tokens(token_ids=np.array(prefixes[-1][:end], dtype=np.int32), weights=token_weights[:end])


def end_of_turn(token_ids: list[int], *, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns one past the turn's last special token, if only white space follows it; else the end of the tokens.

    Templates such as Qwen's put a newline after the end-of-turn token. Generation stops before it, so it is not learnt.
    """
    special = set(special_tokens(tokenizer).values())
    last = max((index for index in range(start, len(token_ids)) if token_ids[index] in special), default=None)
    if last is None or str(tokenizer.decode(token_ids[last + 1 :])).strip():
        return len(token_ids)
    return last + 1


def _first_difference(earlier: list[int], later: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    pairs = enumerate(zip(earlier, later, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(earlier), len(later)))
    window = slice(max(0, at - 4), at + 5)
    return (
        "the chat template is not prefix-preserving, so the assistant's tokens cannot be told apart: at token "
        f"{at} the conversation up to here reads {tokenizer.decode(earlier[window])!r} but with the next turn "
        f"{tokenizer.decode(later[window])!r}; use a template that renders every turn alone"
    )
