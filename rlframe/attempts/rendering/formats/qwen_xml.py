"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME>`, each argument as `<parameter=NAME>` value `</parameter>`."""

import re
from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, bare_value, trimmed
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.text.tool_calls import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(rf"{OPEN}\s*<function=([^>\n]*)>")
END = re.compile(rf"</function>\s*{CLOSE}")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


class QwenXml(Format):
    """Calls with an element for each argument, whose values are bare."""

    markers = (OPEN, CLOSE)

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return "<function=" in template and OPEN in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts."""
        found: list[Part] = []
        at = 0
        while (start := text.find(OPEN, at)) >= 0:
            # The end is looked for behind a beginning only, so that a text is read once.
            head = HEAD.match(text, start)
            if head and (last := END.search(text, head.end())):
                end = last.end()
                call = self._read(head[1].strip(), text[head.end() : last.start()], text[start:end], tools)
            else:
                close = -1 if head else text.find(CLOSE, start)
                end = len(text) if close < 0 else close + len(CLOSE)
                fault = f"a call must be {OPEN}<function=NAME>...</function>{CLOSE}"
                call = Call(text=text[start:end], fault=fault)
            found += [text[at:start], call]
            at = end
        return trimmed([*found, text[at:]])

    def _read(self, name: str, body: str, text: str, tools: Mapping[str, Tool]) -> Call:
        arguments, at = {}, 0
        while parameter := PARAMETER.match(body, at):
            if parameter[1] in arguments:
                return Call(text=text, fault=f"the argument {parameter[1]!r:.80} stands twice")
            arguments[parameter[1]] = bare_value(parameter[2], parameter[1], tools.get(name))
            at = parameter.end()
        if body[at:].strip():
            return Call(text=text, fault="an argument must be <parameter=name>value</parameter>")
        return Call(text=text, name=name, arguments=arguments)


FORMAT = QwenXml
