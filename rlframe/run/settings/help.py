"""The text of `--help`."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from rlframe.run.settings.source import Class
from rlframe.run.settings.tree import Section, Setting, component, components, find, whole

USAGE = """\
rlframe --config-name NAME key=value ...      starts a run, or resumes it
rlframe --config-name NAME -m key=a,b ...     starts a run for each value, and prints a table
rlframe --config-name NAME --cfg job          prints the composed configuration
rlframe TOOL ...                              starts a tool: {tools}
rlframe --help train.optimizer                prints a section, a setting, or a component such as algorithm.grpo

--config-dir DIR   a folder of your own YAML files, which come before those of the package
group=NAME         takes configs/group/NAME.yaml; ~key removes a key or a group
{completion}

Configurations: {names}
Groups: {groups}
"""
COMPLETION = 'Completion: eval "$(rlframe -sc install=bash)"; with fish: rlframe -sc install=fish | source'
WIDEST = 120
INDENT = "    "


def overview(*, tools: Sequence[str], names: Sequence[str], groups: Sequence[str], width: int) -> Iterator[str]:
    """Yields the lines of `--help`: how to call the program, and every setting."""
    usage = USAGE.format(
        tools=", ".join(tools), names=", ".join(names), groups=", ".join(groups), completion=COMPLETION
    )
    for line in usage.splitlines():
        yield from textwrap.wrap(line, width, subsequent_indent="  ", replace_whitespace=False) or [""]
    yield ""
    yield from described(whole(), width=width)


def topic(name: str, *, width: int) -> Iterator[str]:
    """Yields the lines of `--help name`.

    Raises:
        UsageError: there is no such section, setting or component.
    """
    found = find(name)
    yield from setting_lines(found, width=width) if isinstance(found, Setting) else described(found, width=width)


def described(top: Section, *, width: int) -> Iterator[str]:
    """Yields the lines of a section and of all sections in it. One with the settings of an earlier one refers to it."""
    shown: dict[Class, str] = {}
    skipped: set[str] = set()
    for part in top.walk():
        if any(part.key.startswith(f"{each}.") for each in skipped):
            continue
        earlier = next((key for kind, key in shown.items() if part.declared and kind.node is part.declared.node), None)
        yield from _title(part, width=width)
        if earlier is not None:
            skipped.add(part.key)
            yield f"{INDENT}Its settings are those of {earlier}."
            yield ""
            continue
        if part.declared:
            shown[part.declared] = part.key
        for setting in part.settings:
            yield from setting_lines(setting, width=width)
        yield from _components(part, width=width)
        if part.settings or part.components:
            yield ""


def _title(part: Section, *, width: int) -> Iterator[str]:
    yield part.title or part.key or "The run"
    for paragraph in part.text.split("\n\n"):
        yield from textwrap.wrap(paragraph, width, initial_indent="  ", subsequent_indent="  ")
    yield ""


def setting_lines(setting: Setting, *, width: int) -> Iterator[str]:
    """Yields `key=default  (type)` and the docstring."""
    given = f"{setting.key}={setting.default}" if setting.default is not None else f"{setting.key}=... must be given"
    head = f"{given}  ({setting.kind.words})"
    yield from textwrap.wrap(head, width, subsequent_indent=INDENT, break_on_hyphens=False)
    yield from textwrap.wrap(setting.text, width, initial_indent=INDENT, subsequent_indent=INDENT)
    for name, text in setting.kind.members.items():
        yield from textwrap.wrap(f"{name}: {text}", width, initial_indent=INDENT * 2, subsequent_indent=INDENT * 2)


def _components(part: Section, *, width: int) -> Iterator[str]:
    """Yields a line for each component whose settings can stand in the section."""
    for number, name in enumerate(components(part.components)):
        if number == 0:
            yield f"Components, each with settings of its own (--help {part.components}.NAME):"
        text = " ".join(component(part.components, name).text.split("\n\n")[0].split())
        yield from textwrap.wrap(f"{name}: {text}", width, initial_indent=INDENT, subsequent_indent=INDENT * 2)


def columns() -> int:
    """Returns the width of the text."""
    return min(WIDEST, shutil.get_terminal_size(fallback=(WIDEST, 24)).columns)
