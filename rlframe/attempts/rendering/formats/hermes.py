"""Hermes and Qwen: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`."""

from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, after_space, call_of, calls_in, read_object
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.text.tool_calls import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Format):
    """Calls as JSON objects between tags."""

    markers = (OPEN, CLOSE)

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return OPEN in template and "<arg_key>" not in template and "<function=" not in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts."""
        return calls_in(text, OPEN, self._read)

    def _read(self, text: str, start: int) -> tuple[Call, int]:
        """Returns the call whose tag is at `start`, and the position after it."""
        inside = start + len(OPEN)
        try:
            value, after = read_object(text, after_space(text, inside))
        except ValueError as error:
            close = text.find(CLOSE, inside)
            end = len(text) if close < 0 else close + len(CLOSE)
            return Call(text=text[start:end], fault=f"the call is not JSON ({error!s:.120})"), end
        close = text.find(CLOSE, after)
        end = len(text) if close < 0 else close + len(CLOSE)
        if close < 0 or text[after:close].strip():
            fault = f"the call is not closed by {CLOSE}" if close < 0 else f"text stands between the call and {CLOSE}"
            return Call(text=text[start:end], fault=fault), end
        return call_of(value, text[start:end]), end


FORMAT = Hermes
