"""Translates command-line overrides, as users write them, into Hydra's grammar."""

import re
from collections.abc import Iterator, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlframe.utils.bounds import shortened
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
NAMES = re.compile(r"(?!(?i:null|true|false|nan|inf)\b)\[?[A-Za-z_][\w/.,*()\[\]-]*")
"""Pattern of file names of a group: one, or several for a sweep (`cpu,cuda`, `glob(*)`)."""
DEEPEST = 50
"""Greatest nesting of brackets in a value, because Hydra's parser recurses for each."""

WITH_VALUE = ("--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp", "--cfg", "-c", "--package", "-p")
WITH_VALUE += ("--info", "-i", "--experimental-rerun")
"""Options of the program that may stand before their value."""
SHORT = {"train.lr": "train.optimizer.lr"}
"""Shorthands of keys on the command line. Files use the whole key only."""


def overrides_last(arguments: Sequence[str]) -> list[str]:
    """Returns the options of the program, then the overrides, which Hydra takes in one row only.

    Example:
        >>> overrides_last(["steps=1", "-m", "seed=1,2"])
        ['-m', 'steps=1', 'seed=1,2']
    """
    options: list[str] = []
    overrides: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        is_override = word.startswith(("~", "+")) or ("=" in word and not word.startswith("-"))
        (overrides if is_override and before not in WITH_VALUE else options).append(word)
    return [*options, *overrides]


def rewritten(arguments: list[str], *, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns `arguments` with `key=value` turned into `++key=value`, so that a key needs no mention in any YAML file.

    Options (`-m`, `--cfg job`), `hydra.*`, deletions (`~key`), explicit `+key` and choices of a group (`data=gsm8k`)
    are unchanged. A value that Hydra's grammar cannot read (`train.jsonl#500`) is quoted. A shorthand becomes the whole
    key.

    Args:
        groups: names that select a file when they stand alone before `=`, with the names of the files.

    Raises:
        ConfigError: Hydra would reject an argument or read it as something else, with a sentence for each; or a key is
            given twice, as shorthand and in full.
    """
    if {"-sc", "--shell_completion"} & set(arguments):
        # `install=bash` is no setting.
        return arguments
    loose = [
        Fault(shortened(word), "must be key=value, such as steps=3")
        for before, word in zip(["", *arguments], arguments, strict=False)
        if word and not word.startswith(("-", "~")) and "=" not in word and before not in WITH_VALUE
    ]
    if faults := loose + [fault for argument in arguments for fault in _faults(argument, groups)]:
        raise ConfigError(faults)
    keys = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    if twice := [short for short in SHORT if {short, SHORT[short]} <= keys]:
        raise ConfigError(
            [Fault(short, f"must not be combined with {SHORT[short]}, for which it is a shorthand") for short in twice]
        )
    if faults := list(_into_lists(arguments)):
        raise ConfigError(faults)
    return [_rewritten(argument, groups) for argument in arguments]


def _into_lists(arguments: Sequence[str]) -> Iterator[Fault]:
    """Yields a fault for each key inside of a list that another argument gives. A number is the place of an item."""
    written = [(argument, *argument.lstrip("+").partition("=")[::2]) for argument in arguments]
    lists = {key: value for _, key, value in written if value.startswith("[")}
    for argument, key, _ in written:
        for whole, value in lists.items():
            plain = key.lstrip("~")
            first = plain.removeprefix(f"{whole}.").partition(".")[0]
            if plain.startswith(f"{whole}.") and (key != plain or not first.isdecimal()):
                rule = f"must not be combined with {whole}={value}, because a list has no keys"
                yield Fault(plain, rule, got=argument, hint=f"write the whole list as {whole}=[...]")


def _faults(argument: str, groups: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    """Yields why an argument cannot be an override. Options, and the words that follow some of them, are left to
    Hydra."""
    key, equals, value = argument.partition("=")
    if argument.startswith("-") and equals and not any(name.startswith(key) for name in WITH_VALUE):
        yield Fault(shortened(argument), "must have no dashes", hint=f"write {shortened(argument.lstrip('-'))}")
    if argument.startswith("-") or (argument and not equals):
        return
    if depth(value) > DEEPEST:
        yield Fault(key, f"must have at most {DEEPEST} nested brackets", got=depth(value), why=f"{shortened(value)}")
    elif not _readable(f"{key}=x") or not key.strip("+~"):
        yield Fault(shortened(argument), "must be key=value with a dotted key, such as train.dtype=float32")
    elif key in groups and not NAMES.fullmatch(value):
        yield Fault(
            key,
            f"must name a file of configs/{key}: {', '.join(groups[key])}",
            got=shortened(value),
            hint=_own_part(key, value) or f"~{key} removes the group",
        )
    elif key in groups and (unknown := [name for name in _choices(value) if name not in groups[key]]):
        near = did_you_mean(unknown[0], groups[key])
        yield Fault(
            key, f"must name a file of configs/{key}: {', '.join(groups[key])}", got=repr(unknown[0]), hint=near
        )


def _own_part(group: str, value: str) -> str:
    """Returns where `value` belongs if it names a function or class outside the package. Else an empty text."""
    key = {"reward": "reward.parts.NAME.name", "algorithm": "algorithm.name", "environment": "environment.name"}
    return f"write {key[group]}={value}" if group in key and re.fullmatch(r"[\w./-]+:\w+", value) else ""


def _choices(value: str) -> list[str]:
    """Returns the names in `grpo`, `grpo,rloo` or `[math,length]`. Hydra reads other forms, such as `glob(*)`."""
    names = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return names.split(",") if re.fullmatch(r"[\w.,-]+", names) else []


def depth(text: str) -> int:
    """Returns the greatest nesting of brackets."""
    deepest = now = 0
    for character in text:
        now += (character in "[{(") - (character in "]})")
        deepest = max(deepest, now)
    return deepest


def _rewritten(argument: str, groups: Mapping[str, Sequence[str]]) -> str:
    match = ASSIGNMENT.fullmatch(argument)
    if not match or match["key"] in groups or match["key"].startswith("hydra."):
        return argument
    prefix, value = f"++{SHORT.get(match['key'], match['key'])}=", match["value"]
    if _readable(prefix + value):
        return prefix + value
    if value.startswith("[") and value.endswith("]") and not set("[]{}'\"") & set(value[1:-1]):
        return prefix + "[" + ",".join(quoted(item.strip()) for item in value[1:-1].split(",")) + "]"
    return prefix + quoted(value)


def _readable(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, ValueError):
        # ValueError: a whole number of more than 4300 digits, which Python refuses to read.
        return False
    return True


def quoted(text: str) -> str:
    """Returns `text` in single quotes for Hydra, where only a backslash before a quote needs doubling."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"
