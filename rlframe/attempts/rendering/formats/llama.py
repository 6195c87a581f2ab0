"""Llama 3: the whole turn is a JSON object with name and parameters, with or without `<|python_tag|>`."""

import re
from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, after_space, call_of, read_object
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.text.tool_calls import Tool

TAG = "<|python_tag|>"
BEGINNING = re.compile(r'\s*\{\s*"(?:name|type|parameters|function)"')


class Llama(Format):
    """One call, which is the whole turn."""

    markers = (TAG,)

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return "<|start_header_id|>" in template and '"parameters": ' in template and "tool_calls" in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts. Text that does not begin like a call is text."""
        tagged = text.startswith(TAG)
        body = text.removeprefix(TAG)
        if not tagged and not BEGINNING.match(body):
            return [text]
        try:
            value, end = read_object(body, after_space(body, 0))
        except ValueError as error:
            return [Call(text=text, fault=f"the call is not JSON ({error!s:.120})")]
        if body[end:].strip():
            return [Call(text=text, fault="a turn can make one call, and nothing may follow it")]
        return [call_of(value, text, arguments="parameters")]


FORMAT = Llama
