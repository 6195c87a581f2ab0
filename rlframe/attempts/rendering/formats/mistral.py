"""Mistral: `[TOOL_CALLS]` and a list of JSON objects, or for each call a name, `[ARGS]` and a JSON object."""

import re
from collections.abc import Mapping

from rlframe.attempts.rendering.formats.base import Format, after_space, call_of, read_object, trimmed
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.text.tool_calls import Tool

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEAD = re.compile(r"\s*([^\[\s]+?)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]\s*")


class Mistral(Format):
    """Calls after a tag, to the end of the turn."""

    markers = (TAG, ARGS, CALL_ID)

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return TAG in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts."""
        before, *rest = text.split(TAG)
        found: list[Part] = [before]
        for body in rest:
            found += self._calls(body)
        return trimmed(found)

    def _calls(self, body: str) -> list[Call]:
        """Returns the calls between a tag and the next one."""
        whole = TAG + body
        try:
            if body.lstrip().startswith("["):
                values, end = read_object(body, after_space(body, 0))
                if body[end:].strip():
                    return [Call(text=whole, fault="nothing may follow the list of calls")]
                if not values:
                    return [Call(text=whole, fault="the list has no call")]
                texts = [whole] if len(values) == 1 else _texts(body, len(values))
                return [call_of(value, text) for value, text in zip(values, texts, strict=True)]
            if not (head := HEAD.match(body)):
                return [Call(text=whole, fault=f"a call must be {TAG}NAME{ARGS} and a JSON object")]
            value, end = read_object(body, head.end())
        except ValueError as error:
            return [Call(text=whole, fault=f"the call is not JSON ({error!s:.120})")]
        if body[end:].strip():
            return [Call(text=whole, fault="nothing may follow the arguments of a call")]
        return [Call(text=whole, name=head[1], arguments=value, id=head[2])]


def _texts(body: str, count: int) -> list[str]:
    """Returns the calls of a list of `count` as the policy would have written each alone."""
    found, at = [], body.index("[") + 1
    for _ in range(count):
        start = after_space(body, at)
        _, end = read_object(body, start)
        found.append(f"{TAG}[{body[start:end]}]")
        # Behind the comma.
        at = after_space(body, end) + 1
    return found


FORMAT = Mistral
