"""DeepSeek V3 and R1: calls between tokens of their own, with the arguments as JSON, in V3 and R1 in a code block."""

from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, trimmed
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.records import parse_json
from rlframe.data.text.tool_calls import Tool

CALLS, NO_MORE_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, SEPARATOR, END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
BLOCK, END_BLOCK = "```json\n", "\n```"


class DeepSeek(Format):
    """Calls between tokens, a name and arguments each."""

    markers = (CALLS, NO_MORE_CALLS, CALL, SEPARATOR, END)

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return CALLS in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts."""
        found: list[Part] = []
        at = 0
        while (start := text.find(CALLS, at)) >= 0:
            close = text.find(NO_MORE_CALLS, start)
            end = len(text) if close < 0 else close + len(NO_MORE_CALLS)
            inside = text[start + len(CALLS) : end].removesuffix(NO_MORE_CALLS)
            found += [text[at:start], *self._calls(inside, text[start:end], is_closed=close >= 0)]
            at = end
        return trimmed([*found, text[at:]])

    def _calls(self, inside: str, whole: str, *, is_closed: bool) -> list[Call]:
        """Returns the calls of one list of calls."""
        if not is_closed:
            return [Call(text=whole, fault=f"the calls are not closed by {NO_MORE_CALLS}")]
        before, *pieces = inside.split(CALL)
        if before.strip() or not pieces:
            return [Call(text=whole, fault=f"expected {CALL} after {CALLS}")]
        return [self._read(piece) for piece in pieces]

    def _read(self, piece: str) -> Call:
        text = CALL + piece.rstrip()
        body, closed, rest = piece.partition(END)
        kind, separated, right = body.partition(SEPARATOR)
        if not closed or not separated or rest.strip():
            return Call(text=text, fault=f"a call must be {CALL}...{SEPARATOR}...{END}")
        name, block, arguments = right.partition(BLOCK)
        if not block:
            name, arguments = kind, right
        elif arguments.rstrip().endswith(END_BLOCK):
            arguments = arguments.rstrip().removesuffix(END_BLOCK)
        else:
            return Call(text=text, fault="the block of arguments is not closed")
        try:
            return Call(text=text, name=name.strip(), arguments=parse_json(arguments))
        except ValueError as error:
            return Call(text=text, fault=f"the arguments are not JSON ({error!s:.120})")


FORMAT = DeepSeek
