"""Chooses the forms of tool calls and reasoning that a chat template has."""

from rlframe.attempts.rendering.config import AUTO, NONE, RenderingConfig
from rlframe.attempts.rendering.formats import find_format, names
from rlframe.attempts.rendering.formats.base import Format, NoCalls
from rlframe.attempts.rendering.reasoning import STYLES, Style
from rlframe.utils.errors import SettingError

WORDS = ("tool_calls", "tools", "function_call")
"""Words of which a template with tools has one."""


def format_of(settings: RenderingConfig, template: str) -> Format | SettingError:
    """Returns the form of tool calls, or the error of a run that uses tools, if the template does not tell it."""
    if settings.tool_calls != AUTO:
        return NoCalls() if settings.tool_calls == NONE else find_format(settings.tool_calls)()
    found = [name for name in names() if find_format(name).is_written_by(template)]
    if len(found) == 1:
        return find_format(found[0])()
    if not found and not any(word in template for word in WORDS):
        return NoCalls()
    return SettingError(
        "tool_calls",
        f"cannot be told from the chat template, which {_reads(found)}",
        got=AUTO,
        hint=f"choose one of {', '.join(names())}, or none",
    )


def style_of(settings: RenderingConfig, template: str) -> Style | None:
    """Returns the form of reasoning, or None if reasoning is not told from the content.

    Raises:
        SettingError: the template reads like several.
    """
    if settings.reasoning != AUTO:
        return STYLES.get(settings.reasoning)
    found = [name for name, style in STYLES.items() if style.is_written_by(template)]
    if len(found) > 1:
        raise SettingError(
            "reasoning",
            f"cannot be told from the chat template, which {_reads(found)}",
            got=AUTO,
            hint=f"choose one of {', '.join(found)}, or none",
        )
    return STYLES[found[0]] if found else None


def _reads(found: list[str]) -> str:
    return f"reads like {' and '.join(found)}" if found else "has tools in a form that is not known"
