"""Command-line overrides as a user writes them, made ready for Hydra's grammar."""

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)


def rewritten(arguments: list[str], *, groups: set[str]) -> list[str]:
    """`arguments` with `key=value` turned into `++key=value`, so that a key needs no mention in any YAML file.

    Options (`-m`, `--cfg job`), `hydra.*`, deletions (`~key`), explicit `+key` and choices of a group (`data=gsm8k`)
    stay as they are. A value that Hydra's grammar does not read (`train.jsonl#500`) is quoted.

    Args:
        groups: names that select a file when they stand alone before `=`.
    """
    return [_rewritten(argument, groups) for argument in arguments]


def _rewritten(argument: str, groups: set[str]) -> str:
    match = ASSIGNMENT.fullmatch(argument)
    if not match or match["key"] in groups or match["key"].startswith("hydra."):
        return argument
    prefix, value = f"++{match['key']}=", match["value"]
    if _readable(prefix + value):
        return prefix + value
    if value.startswith("[") and value.endswith("]") and not set("[]{}'\"") & set(value[1:-1]):
        return prefix + "[" + ",".join(_quoted(item) for item in value[1:-1].split(",")) + "]"
    return prefix + _quoted(value)


def _readable(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def _quoted(text: str) -> str:
    """`text` in single quotes, in Hydra's way: a backslash needs doubling only where it stands before a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"
