"""The reference of all settings, as Markdown, from the dataclasses and their docstrings."""

import ast
from collections.abc import Iterator

from rlframe.run.settings.tree import Section, Setting, component, components, kinds_of_components, whole

HEAD = """# Settings

Every setting of a run. Set one on the command line, `key=value`, or in a YAML file of `configs/`. A number states its
range. `rlframe --help train.optimizer` prints a part of this page."""


def page() -> str:
    """Returns the page."""
    seen: dict[ast.ClassDef, str] = {}
    parts = [HEAD, *described(whole(), seen, title="The run", level=2)]
    for kind in kinds_of_components():
        # Engines of a teacher and of a judge are those of the policy.
        if kind.endswith(".engine"):
            continue
        parts.append(f"## Components of `{kind}`")
        for name in components(kind):
            parts += described(component(kind, name), seen, title=f"`{name}`", level=3, inside=f"`{name}`")
    return "\n\n".join(parts) + "\n"


def described(
    part: Section, seen: dict[ast.ClassDef, str], *, title: str, level: int, inside: str = ""
) -> Iterator[str]:
    """Yields the paragraphs of a section and of those in it. One with the dataclass of an earlier one refers to it.

    Args:
        seen: the sections so far, by their dataclass: a key, or for those in a component its name.
        level: of the heading.
    """
    if part.declared:
        if earlier := seen.get(part.declared.node):
            yield f"{title} has the settings that stand above under {earlier}."
            return
        seen[part.declared.node] = inside or title
    yield f"{'#' * level} {title}"
    if part.text:
        yield text(part.text)
    if part.components:
        names = ", ".join(f"`{each}`" for each in components(part.components))
        yield f"Its further settings are those of the component: {names}."
    if part.settings:
        yield "\n".join(["| setting | type | default | |", "|---|---|---|---|", *map(row, part.settings)])
    for inner in part.sections:
        below = min(level + 1, 4) if part.key else 2
        yield from described(inner, seen, title=f"`{inner.key}`", level=below, inside=inside)


def row(setting: Setting) -> str:
    """Returns the line of a setting."""
    default = "-" if setting.default is None else f"`{setting.default or repr('')}`"
    members = " ".join(f"`{name}`: {text(meaning)}" for name, meaning in setting.kind.members.items())
    said = f"{text(setting.text)} {members}".strip()
    return f"| `{setting.key}` | {text(setting.kind.words)} | {default} | {said} |"


def text(words: str) -> str:
    """Returns a docstring as one line that is safe in a table."""
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;")
