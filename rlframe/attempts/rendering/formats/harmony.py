"""gpt-oss: a turn is a row of messages with channels; a call is a message to `functions.NAME` with JSON as its text.

Source: the format's description, https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, trimmed
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.records import parse_json
from rlframe.data.text.tool_calls import Tool

CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
PREFIX = "functions."


class Harmony(Format):
    """Calls as messages to a function."""

    markers = (CHANNEL, MESSAGE, "<|start|>", "<|constrain|>")

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return CHANNEL in template and MESSAGE in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts. Messages without a recipient are the content, without their headers."""
        found: list[Part] = []
        for whole, header, body in messages_of(text):
            recipient = RECIPIENT.search(header)
            if recipient and recipient[1] != "assistant":
                found.append(self._read(whole, recipient[1], body))
            else:
                found.append(body)
        return trimmed(found)

    def plain(self, text: str) -> list[Part]:
        """See Format.plain. Every message has a header, so that one to a tool is told from the content here too."""
        return self.parts(text, {})

    def _read(self, whole: str, recipient: str, body: str) -> Call:
        if not recipient.startswith(PREFIX):
            return Call(text=whole, fault=f"there is no recipient {recipient!r:.80}; tools are {PREFIX}NAME")
        try:
            return Call(text=whole, name=recipient.removeprefix(PREFIX), arguments=parse_json(body))
        except ValueError as error:
            return Call(text=whole, fault=f"the arguments are not JSON ({error!s:.120})")


def messages_of(text: str) -> list[tuple[str, str, str]]:
    """Returns the messages of a turn in order: the whole text, the header and the body of each.

    Text outside of any message is the body of one without a header.
    """
    pieces = re.split("(" + "|".join(map(re.escape, ENDS)) + ")", text)
    found = []
    for piece, end in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        header, opened, body = piece.partition(MESSAGE)
        if opened:
            found.append((piece + end, header, body))
        elif piece:
            found.append((piece + end, "", piece))
    return found


FORMAT = Harmony
