"""Completion of the command line by a shell: keys from the dataclasses, choices and configurations from the files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from rlframe.run.choices import CHOICES, OPTIONS
from rlframe.run.settings.tree import ENTRY, Setting, component, components, kinds_of_components, topics, whole

PROGRAM_OPTIONS = ("--config-name", "--config-dir", "--help", "--multirun", "--cfg", "--resolve", "--info")
AFTER_OPTION = {"--cfg": ("job", "hydra", "all"), "--info": ("config", "defaults", "defaults-tree", "searchpath")}
PREFIXES = "+~"


def words_of(line: str) -> tuple[list[str], str]:
    """Returns the whole words after the program's name, and the one that is being typed."""
    words = line.split()
    current = "" if not line or line[-1].isspace() else words.pop()
    by_python = bool(words) and Path(words[0]).name.startswith("python")
    start = 1 if not by_python else 3 if words[1:2] == ["-m"] else 2
    return words[start:], current


class Completion:
    """Words that a shell can offer. The first of `folders` has precedence."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        folders: Sequence[Path],
        names: Sequence[str],
        groups: Mapping[str, Sequence[str]],
        tools: Sequence[str],
        default_name: str,
    ):
        """
        Args:
            words: whole words before the one that is typed.
            folders: with YAML files.
            names: of configurations.
            groups: names of files by group.
            default_name: of the configuration without `--config-name`.
        """
        self._words, self._folders, self._names, self._groups, self._tools = words, folders, names, groups, tools
        self._default_name = default_name

    def of(self, current: str) -> list[str]:
        """Returns the words that begin with `current`, up to the next dot of a key."""
        last = self._words[-1] if self._words else ""
        option, equals, _ = current.partition("=")
        if last in ("--config-name", "-cn"):
            found: Iterable[str] = self._names
        elif option == "--config-name" and equals:
            found = [f"{option}={name}" for name in self._names]
        elif last in AFTER_OPTION:
            found = AFTER_OPTION[last]
        elif last in ("--help", "-h"):
            found = (each.removesuffix(".") for each in _by_level(topics(whole()), current))
        elif last in ("--config-dir", "-cd"):
            found = ()
        elif current.startswith("-"):
            found = PROGRAM_OPTIONS
        else:
            prefix = current[: len(current) - len(current.lstrip(PREFIXES))]
            found = (prefix + each for each in self._overrides(current[len(prefix) :], first=not self._words))
        return sorted({each for each in found if each.startswith(current)})

    def _overrides(self, current: str, *, first: bool) -> Iterator[str]:
        key, equals, _ = current.partition("=")
        if equals:
            yield from (f"{key}={value}" for value in self._values(key))
            return
        if first:
            yield from self._tools
        yield from (f"{group}=" for group in self._groups)
        yield from _by_level([f"{setting.key}=" for setting in self._settings()], current)

    def _settings(self) -> list[Setting]:
        """Returns the settings of the run, and of the components that the command line or the configuration names."""
        found = whole().all_settings()
        for section in kinds_of_components():
            name = self._chosen(section)
            if name in components(section):
                found += component(section, name).all_settings()
        return found

    def _values(self, key: str) -> Iterable[str]:
        if key in self._groups:
            return self._groups[key]
        pattern = _with_entries(key)
        for section in (*CHOICES, "environment"):
            if key == f"{section}.name":
                return components(section)
        for section, (_, place) in OPTIONS.items():
            if pattern == f"{place.removesuffix('.options')}.name":
                return components(section)
        return next((each.kind.values for each in self._settings() if each.key in (key, pattern)), ())

    def _chosen(self, section: str) -> str:
        """Returns the name of the component in a section: the word `section.name=NAME`, or that of the file which a
        word or the configuration selects. Empty if none does."""
        parts = [word.lstrip(PREFIXES).partition("=") for word in self._words]
        given = {key: value for key, equals, value in parts if equals}
        if name := given.get(f"{section}.name"):
            return name
        file = given.get(section) or self._defaults(self._config_name()).get(section)
        return str(self._content(f"{section}/{file}").get("name", "")) if file else ""

    def _config_name(self) -> str:
        for word, after in zip_longest(self._words, self._words[1:], fillvalue=""):
            if word in ("--config-name", "-cn"):
                return after
            if word.startswith("--config-name="):
                return word.partition("=")[2]
        return self._default_name

    def _defaults(self, name: str, depth: int = 0) -> dict[str, Any]:
        """Returns the files that a configuration selects, by group."""
        found: dict[str, Any] = {}
        entries = self._content(name).get("defaults") or []
        for entry in entries if isinstance(entries, list) and depth < 5 else []:
            if isinstance(entry, str) and entry != "_self_":
                found |= self._defaults(entry, depth + 1)
            elif isinstance(entry, dict):
                found |= {str(group).removeprefix("override ").lstrip("/"): file for group, file in entry.items()}
        return found

    def _content(self, name: str) -> dict[str, Any]:
        for folder in self._folders:
            try:
                content = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError, UnicodeDecodeError):
                continue
            return content if isinstance(content, dict) else {}
        return {}


def _by_level(keys: Iterable[str], current: str) -> Iterator[str]:
    """Yields the keys that begin with `current`, up to the next dot. A name of one's choice in `current` stands for
    any."""
    typed = current.split(".")
    for key in keys:
        parts = key.split(".")
        if ENTRY in parts:
            place = parts.index(ENTRY)
            if place == len(typed) - 1:
                continue
            if place < len(typed):
                parts[place] = typed[place]
        key = ".".join(parts)
        if key.startswith(current):
            yield ".".join(parts[: len(typed)]) + ("." if len(parts) > len(typed) else "")


def _with_entries(key: str) -> str:
    """Returns `reward.parts.NAME.weight` for `reward.parts.mine.weight`."""
    parts = key.split(".")
    for place in [each.key for each in whole().walk()] + [place for _, place in OPTIONS.values()]:
        before, found, _ = place.partition(f".{ENTRY}")
        start = before.split(".")
        if found and parts[: len(start)] == start and len(parts) > len(start) + 1:
            return ".".join([*start, ENTRY, *parts[len(start) + 1 :]])
    return key
