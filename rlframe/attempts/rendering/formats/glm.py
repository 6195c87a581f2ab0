"""GLM-4.5: `<tool_call>NAME`, each argument as `<arg_key>` and `<arg_value>`, `</tool_call>`."""

import re
from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, bare_value, trimmed
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.text.tool_calls import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY = "<arg_key>"
END = re.compile(rf"</arg_value>\s*{CLOSE}")
ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)


class Glm(Format):
    """Calls with a pair of elements for each argument; texts are bare, other values are JSON."""

    markers = (OPEN, CLOSE, KEY, "</arg_key>", "<arg_value>", "</arg_value>")

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return KEY in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts. A line feed before the text is the template's."""
        text = text.strip("\n")
        found: list[Part] = []
        at = 0
        while (start := text.find(OPEN, at)) >= 0:
            close = _close(text, start)
            end = len(text) if close < 0 else close + len(CLOSE)
            if close < 0:
                call = Call(text=text[start:], fault=f"the call is not closed by {CLOSE}")
            else:
                call = self._read(text[start + len(OPEN) : close], text[start:end], tools)
            found += [text[at:start], call]
            at = end
        return trimmed([*found, text[at:]])

    def plain(self, text: str) -> list[Part]:
        """See Format.plain. A line feed before the text is the template's."""
        return [text.strip("\n")]

    def _read(self, inside: str, text: str, tools: Mapping[str, Tool]) -> Call:
        name, key, rest = inside.partition(KEY)
        name, body = name.strip(), key + rest
        arguments, at = {}, 0
        while argument := ARGUMENT.match(body, at):
            if argument[1] in arguments:
                return Call(text=text, fault=f"the argument {argument[1]!r:.80} stands twice")
            arguments[argument[1]] = bare_value(argument[2], argument[1], tools.get(name))
            at = argument.end()
        if body[at:].strip():
            fault = "an argument must be <arg_key>name</arg_key><arg_value>value</arg_value>"
            return Call(text=text, fault=fault)
        return Call(text=text, name=name, arguments=arguments)


def _close(text: str, start: int) -> int:
    """Returns the position at which the call at `start` is closed, or -1: behind its last argument, if it has one, in
    whose value the closing tag may stand."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start + len(OPEN))
    if KEY in text[start : max(start, close)]:
        last = END.search(text, start, following if following >= 0 else len(text))
        return last.end() - len(CLOSE) if last else close
    return close


FORMAT = Glm
