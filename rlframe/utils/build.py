"""Builds config dataclasses from plain nested dicts, strictly, and collects all faults before it reports them.

It is not pydantic, because a section's dataclass is found by `name` in a file, or outside the package, that is imported
only then, while a discriminated union needs all classes at once. pydantic's lax mode accepts "1" for 1, its strict mode
accepts no text for a float, which YAML 1.1 needs, and its error types would have to be translated into the sentences
built here.
"""

import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import EnumType, StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from rlframe.utils.bounds import out_of_bounds, shortened
from rlframe.utils.errors import ConfigError, SettingError
from rlframe.utils.faults import Fault, Key
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.registry import find

Config = TypeVar("Config")
FAULTY = object()
"""Stands for a value that could not be built and whose fault is already recorded."""
TO_BE_GIVEN = "???"
"""OmegaConf's mark for a value that a group file leaves to the user."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Pattern of a byte of the command line that is not UTF-8, which cannot be written to a file."""
hints_of = cache(get_type_hints)
QUOTED = {bool: re.compile("true|false", re.IGNORECASE), int: re.compile(r"-?\d+")}
"""Patterns of text that was meant as a value of another kind."""
UNQUOTED = "write it without quotes, a variable of the environment as ${oc.decode:${oc.env:NAME}}"
PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True, slots=True)
class FormerName:
    """Names what a setting was called before, beside its type: `Annotated[int, FormerName("minibatches")]`."""

    name: str


def build(
    kind: type[Config], values: Mapping[str, Any], *, choices: Mapping[str, str] | None = None, key: str = ""
) -> Config:
    """Returns an instance of the dataclass `kind` from `values`, nested dataclasses included.

    Args:
        key: dotted key of the section that `values` holds.
        choices: by dotted key of a section, the package whose file `<section>.name` holds the section's dataclass,
            which has a field `name` of its own.

    Raises:
        ConfigError: unknown keys (nearest real one named), wrong types, missing keys, numbers out of their bounds, and
            of each section that has none of these what its `__post_init__` refuses first; all at once.
    """
    builder = _Builder(choices=choices or {})
    top = Key.of(key)
    config = builder.section(kind, values, top)
    for unknown in builder.unknown:
        near = _nearest(str(unknown), [str(known) for known in _keys(builder, kind, values, top)])
        builder.faults.append(Fault(unknown, "is not a key", hint=f"did you mean {near}?" if near else ""))
    if builder.faults:
        raise ConfigError(builder.faults)
    return config


def as_dict(config: Any) -> Any:
    """Returns the plain nested dict (or list, or scalar) that `build` turns into `config`; enums become their
    strings."""
    if is_dataclass(config):
        return {field.name: as_dict(getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, Mapping):
        return {key: as_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [as_dict(value) for value in config]
    return config.value if isinstance(config, StrEnum) else config


@dataclass(kw_only=True, slots=True)
class _Builder:
    """Collects faults instead of raising the first one."""

    choices: Mapping[str, str]
    faults: list[Fault] = field(default_factory=list)
    unknown: list[Key] = field(default_factory=list)

    def section(self, kind: Any, values: Any, key: Key) -> Any:
        """Returns the dataclass at `key`, or FAULTY."""
        if not isinstance(values, Mapping):
            return self.fault(key, "a section with keys of its own", values)
        chosen = self.chosen(kind, values, key)
        if chosen is None:
            return FAULTY
        hints = hints_of(chosen)
        arguments = {}
        for item in fields(chosen):
            place = Key((*key, item.name))
            if item.default == "" == values.get(item.name):
                # Nothing stands for no text, as in the configuration that a run has written.
                arguments[item.name] = ""
            elif item.name in values or str(place) in self.choices:
                absent = None if types.NoneType in get_args(hints[item.name]) else {}
                arguments[item.name] = self.value(hints[item.name], values.get(item.name, absent), place)
            elif _required(item):
                arguments[item.name] = self.fault(place, PLAIN.get(hints[item.name], "given"), None)
        renamed = _renamed(chosen)
        for name in values:
            if name in renamed:
                now = Key((*key, renamed[name]))
                self.faults.append(Fault(Key((*key, str(name))), ("is now ", now), hint="use the new name"))
            elif name not in arguments:
                self.unknown.extend(_leaves(values[name], Key((*key, str(name)))))
        return FAULTY if FAULTY in arguments.values() else self.construct(chosen, arguments, key)

    def chosen(self, kind: Any, values: Mapping[str, Any], key: Key) -> type | None:
        """Returns the dataclass for the section `key`: `kind`, or the one in the file named by `<key>.name`."""
        if str(key) not in self.choices:
            return kind
        name = values.get("name", _default(kind, "name"))
        if not isinstance(name, str):
            self.fault(Key((*key, "name")), PLAIN[str], name)
            return None
        try:
            settings = find(self.choices[str(key)], name, key=f"{key}.name")[1]
        except ConfigError as error:
            self.faults.extend(error.faults)
            return None
        if "name" not in hints_of(settings):
            self.fault(Key((*key, "name")), "that of a class whose settings have a field `name: str`", name)
            return None
        return settings

    def construct(self, kind: type, arguments: dict[str, Any], key: Key) -> Any:
        """Returns `kind(**arguments)`, or FAULTY if its bounds or its `__post_init__` refuse them."""
        refused = list(out_of_bounds(kind, arguments))
        if not refused:
            try:
                return kind(**arguments)
            except SettingError as error:
                refused = [error.fault]
            except ValueError as error:
                refused = [Fault("", said=error)]
        self.faults += [fault.below(key) for fault in refused]
        return FAULTY

    def value(self, hint: Any, value: Any, key: Key) -> Any:
        """Returns `value` converted to `hint`, or FAULTY."""
        if value == TO_BE_GIVEN:
            return self.fault(key, "given", None)
        if hint is Any and str(key) not in self.choices:
            return self.anything(value, key)
        if get_origin(hint) in (Union, types.UnionType):
            nothing = value is None and types.NoneType in get_args(hint)
            return None if nothing else self.value(_option(hint, value), value, key)
        if is_dataclass(hint) or str(key) in self.choices:
            return self.section(hint, value, key)
        if get_origin(hint) is list:
            return self.items(get_args(hint)[0], value, key)
        if get_origin(hint) is dict:
            return self.entries(get_args(hint)[1], value, key)
        if isinstance(hint, EnumType):
            names = [str(member) for member in hint]
            # YAML reads true and false as no text.
            text = str(value).lower() if isinstance(value, bool) else value
            if text in names:
                return hint(text)
            near = did_you_mean(value, names) if isinstance(value, str) else ""
            return self.fault(key, f"one of {', '.join(names)}", value, hint=near)
        return self.scalar(hint, value, key)

    def items(self, kind: Any, value: Any, key: Key) -> Any:
        """Returns a list at `key`, or FAULTY."""
        if not isinstance(value, list | tuple):
            return self.fault(key, "a list such as [a,b]", value)
        built = [self.value(kind, item, Key((*key, index))) for index, item in enumerate(value)]
        return FAULTY if FAULTY in built else built

    def entries(self, kind: Any, value: Any, key: Key) -> Any:
        """Returns a dict with names chosen by the user at `key`, or FAULTY."""
        if not isinstance(value, Mapping):
            return self.fault(key, "a section of named entries", value)
        if FAULTY in [self.text(str(name), Key((*key, str(name)))) for name in value]:
            return FAULTY
        built = {str(name): self.value(kind, entry, Key((*key, str(name)))) for name, entry in value.items()}
        return FAULTY if FAULTY in built.values() else built

    def scalar(self, kind: Any, value: Any, key: Key) -> Any:
        """Returns a bool, int, float or str at `key`, or FAULTY. YAML 1.1 reads 1e-6 as a string, so strings may be
        floats."""
        if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                number = float(value)
            except (ValueError, OverflowError):
                number = math.nan
            return self.fault(key, PLAIN[float], value) if math.isnan(number) else number
        if type(value) is not kind:
            quoted = isinstance(value, str) and kind in QUOTED and QUOTED[kind].fullmatch(value)
            return self.fault(key, PLAIN[kind], value, hint=UNQUOTED if quoted else "")
        return self.text(value, key) if isinstance(value, str) else value

    def text(self, value: str, key: Key) -> Any:
        """Returns a string that can be written to a file, or FAULTY."""
        if not value:
            return self.fault(key, "text of at least one character", value)
        if "\0" in value or SURROGATE.search(value):
            return self.fault(key, "text without zero bytes and without halves of UTF-16 pairs", value)
        return value

    def anything(self, value: Any, key: Key) -> Any:
        """Returns a plain value that a file can hold, such as options that are passed on, or FAULTY."""
        if isinstance(value, Mapping):
            return self.entries(Any, value, key)
        if isinstance(value, list | tuple):
            return self.items(Any, value, key)
        if value is None or value == "":
            return value
        if type(value) not in PLAIN or value in (math.inf, -math.inf):
            return self.fault(key, "a finite number, text, true or false, or a list or section of such", value)
        return self.scalar(type(value), value, key)

    def fault(self, key: Key, expected: str, value: Any, *, hint: str = "") -> Any:
        """Records that `key` is not as expected and returns FAULTY."""
        got = "nothing" if value is None else shortened(value)
        self.faults.append(Fault(key, f"must be {expected}", got=got, hint=hint))
        return FAULTY


def _required(item: Field) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _default(kind: Any, name: str) -> Any:
    """Returns the default of a field, or None if the field does not exist."""
    known = [item.default for item in fields(kind) if item.name == name] if is_dataclass(kind) else []
    return known[0] if known and known[0] is not MISSING else None


def _option(union: Any, value: Any) -> Any:
    """Returns the member of `X | None`, `str | SomeDataclass` or `str | list[X] | dict[str, X]` that fits a value: for
    a mapping the dataclass or the dict, for a list the list, for a text or a number its type, otherwise the first."""
    options = [option for option in get_args(union) if option is not types.NoneType]
    if isinstance(value, Mapping):
        fitting = [option for option in options if is_dataclass(option) or get_origin(option) is dict]
    elif isinstance(value, list | tuple):
        fitting = [option for option in options if get_origin(option) is list]
    else:
        fitting = [option for option in options if option is type(value)]
    return (fitting or options)[0]


@cache
def _renamed(kind: type) -> Mapping[str, str]:
    """Returns the present names of fields by their former ones."""
    return {
        mark.name: name
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, FormerName)
    }


def _leaves(value: Any, key: Key) -> Iterator[Key]:
    """Yields the keys of the scalars under `key`, or `key` itself."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, Key((*key, str(name))))
    else:
        yield key


def _keys(builder: _Builder, kind: Any, values: Any, key: Key) -> Iterator[Key]:
    """Yields every key that a user may set under `key`, given the names and choices in `values`."""
    values = values if isinstance(values, Mapping) else {}
    if get_origin(kind) in (Union, types.UnionType):
        if str in get_args(kind):
            # A section with a shorthand, such as train.parallel=d2, may be given whole.
            yield key
        kind = _option(kind, values)
    if get_origin(kind) is dict:
        for name, entry in values.items():
            yield from _keys(builder, get_args(kind)[1], entry, Key((*key, str(name))))
        return
    chosen = _Builder(choices=builder.choices).chosen(kind, values, key)
    if not is_dataclass(chosen):
        yield key
        return
    hints = hints_of(chosen)
    for item in fields(chosen):
        yield from _keys(builder, hints[item.name], values.get(item.name), Key((*key, item.name)))


def _nearest(key: str, known: list[str]) -> str | None:
    """Returns the known key with the same ending (`train.lr` for `train.optimizer.lr`), the name of such a section
    (`rollout.environment` for `environment.name`), or a similar spelling."""
    ending = key.rpartition(".")[2]
    endings = {name: name.rpartition(".")[2] for name in known}
    if ending not in endings.values() and f"{ending}.name" in known:
        return f"{ending}.name"
    alike = [name for name in known if get_close_matches(ending, [endings[name]])]
    return next(iter(get_close_matches(key, [name for name in alike if endings[name] == ending] or alike, 1)), None)
