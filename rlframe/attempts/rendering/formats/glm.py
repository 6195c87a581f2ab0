"""GLM-4.5: `<tool_call>NAME`, each argument as `<arg_key>` and `<arg_value>`, `</tool_call>`."""

import re
from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, bare_value, trimmed
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.text.tool_calls import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY = "<arg_key>"
CALL = re.compile(rf"{OPEN}(.*?)(?=<arg_key>|{CLOSE})(.*?){CLOSE}", re.DOTALL)
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
            if match := CALL.match(text, start):
                call, end = self._read(match, tools), match.end()
            else:
                call, end = Call(text=text[start:], fault=f"the call is not closed by {CLOSE}"), len(text)
            found += [text[at:start], call]
            at = end
        return trimmed([*found, text[at:]])

    def _read(self, match: re.Match[str], tools: Mapping[str, Tool]) -> Call:
        name, body = match[1].strip(), match[2]
        arguments, at = {}, 0
        while argument := ARGUMENT.match(body, at):
            if argument[1] in arguments:
                return Call(text=match[0], fault=f"the argument {argument[1]!r:.80} stands twice")
            arguments[argument[1]] = bare_value(argument[2], argument[1], tools.get(name))
            at = argument.end()
        if body[at:].strip():
            fault = "an argument must be <arg_key>name</arg_key><arg_value>value</arg_value>"
            return Call(text=match[0], fault=fault)
        return Call(text=match[0], name=name, arguments=arguments)


FORMAT = Glm
