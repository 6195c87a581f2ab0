"""Reasoning of the assistant's messages: read from records, given to the template, and never dropped in silence."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.data.records import Record
from rlframe.data.text.special_tokens import Rendering
from rlframe.data.text.template import text_of_template
from rlframe.types.messages import Message
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError

KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names that records give to reasoning."""
READ_AS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read it, by preference: most of them the first, gpt-oss the second."""
KEY = "reasoning_content"
CLOSING = "</think>"


def reasoning_of(record: Record, name: str, turn: Mapping[str, Any], *, role: str) -> dict[str, str]:
    """Returns {"reasoning_content": text} for a turn with reasoning, else nothing.

    Raises:
        DataError: the reasoning is no text, stands twice, or is not the assistant's.
    """
    given = {key: turn[key] for key in KEYS if turn.get(key) not in (None, "")}
    if not given:
        return {}
    key, value = next(iter(given.items()))
    where = f"{record.where}: expected {name}.{key}"
    if role != "assistant":
        raise DataError(f"{where} to be on a message of the assistant, who alone reasons, found the role {role!r}")
    if not isinstance(value, str):
        raise DataError(f"{where} to be text, found {type(value).__name__} {value!r:.60}")
    if any(other != value for other in given.values()):
        raise DataError(f"{where} to be the only reasoning of the message, found {' and '.join(given)}; remove one")
    return {KEY: value} if value.strip() else {}


def as_read(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, where: str) -> list[Message]:
    """Returns the messages, with their reasoning under the name by which the template reads it.

    Raises:
        DataError: the template does not read reasoning.
    """
    if not any(KEY in message for message in messages):
        return list(messages)
    template = text_of_template(tokenizer)
    name = _name_read(template)
    if name is None:
        # DeepSeek R1's takes what stands before the closing tag out of the content.
        into = "" if CLOSING in template else "put it into the content, as the model is to write it, "
        raise DataError(
            f"{where}: the chat template of {tokenizer.name_or_path!r} never reads {KEY}, so the reasoning would be "
            f"lost; {into}remove it from the data, or set data.chat_template to a template that reads it"
        )
    return [_renamed(message, name) for message in messages]


def check_is_written(message: Message, turn: str, rendering: Rendering) -> None:
    """Raises an error if the template leaves out the reasoning of a turn that is learned.

    Args:
        turn: what the template writes for the turn.
    """
    if is_left_out(message, turn):
        raise DataError(
            f"{rendering.where}: the chat template leaves out the {KEY} of a turn that is learned; give that message "
            "the weight 0, remove its reasoning, or set data.chat_template or data.chat_template_kwargs so that it is "
            "written"
        )


def is_left_out(message: Message, text: str) -> bool:
    """Returns whether the message has reasoning that the text has not."""
    return KEY in message and message[KEY].strip() not in text


def remedies(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what helps where the template begins a turn otherwise than it writes it, as those do that begin the
    reasoning."""
    template = text_of_template(tokenizer)
    found = [f"give the turn a {KEY}"] if _name_read(template) else []
    found += ["set data.chat_template_kwargs={enable_thinking: false}"] if "enable_thinking" in template else []
    return ", or ".join([*found, f"set data.chat_template to a template that writes a {KEY} where it begins one"])


def _renamed(message: Message, name: str) -> Message:
    return {name if key == KEY else key: value for key, value in message.items()}


def _name_read(template: str) -> str | None:
    """Returns the name under which a template reads reasoning of a message."""
    return next((name for name in READ_AS if re.search(rf"""(\.|['"]){name}\b""", template)), None)
