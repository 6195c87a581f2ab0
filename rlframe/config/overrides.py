"""Command-line overrides as a user writes them, made ready for Hydra's grammar."""

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlframe.utils.errors import ConfigError

ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)


SHORT = {"train.lr": "train.optimizer.lr"}
"""Keys that the command line has a shorter word for. Files have the whole key only."""


def rewritten(arguments: list[str], *, groups: set[str]) -> list[str]:
    """`arguments` with `key=value` turned into `++key=value`, so that a key needs no mention in any YAML file.

    Options (`-m`, `--cfg job`), `hydra.*`, deletions (`~key`), explicit `+key` and choices of a group (`data=gsm8k`)
    stay as they are. A value that Hydra's grammar does not read (`train.jsonl#500`) is quoted. A short key becomes the
    whole one.

    Args:
        groups: names that select a file when they stand alone before `=`.

    Raises:
        ConfigError: a key is given twice, in short and as a whole.
    """
    keys = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    if twice := [short for short in SHORT if {short, SHORT[short]} <= keys]:
        raise ConfigError([f"{short} must not stand beside {SHORT[short]}, which it is short for" for short in twice])
    return [_rewritten(argument, groups) for argument in arguments]


def _rewritten(argument: str, groups: set[str]) -> str:
    match = ASSIGNMENT.fullmatch(argument)
    if not match or match["key"] in groups or match["key"].startswith("hydra."):
        return argument
    prefix, value = f"++{SHORT.get(match['key'], match['key'])}=", match["value"]
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
