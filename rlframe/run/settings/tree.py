"""All settings of a run, by section."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache

from rlframe.run.choices import CHOICES, OPTIONS
from rlframe.run.settings.kinds import Kind, default_of, kind_of
from rlframe.run.settings.source import Class, named, settings_class
from rlframe.utils import registry
from rlframe.utils.errors import UsageError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

RUN = ("rlframe.run.config", "RunConfig")
COMPOSED = {"name": "the name of the configuration", "output": "outputs/ and the name"}
"""Defaults of settings that composition gives."""
ENTRY = "NAME"
"""Stands in keys for a name of one's choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting."""

    key: str
    kind: Kind
    default: str | None
    """The default as YAML writes it. None if the setting must be given."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section: settings, and sections in it."""

    key: str
    text: str
    title: str = ""
    """The topic of `--help` that shows a component. Empty for the key."""
    components: str = ""
    """The topic before the name of a component with settings of its own, such as algorithm. Empty if there is none."""
    declared: Class | None = None
    """Its dataclass. None if a component in it decides."""
    settings: list[Setting] = field(default_factory=list)
    sections: list["Section"] = field(default_factory=list)

    def walk(self) -> Iterator["Section"]:
        """Yields this section and all below it."""
        yield self
        for inner in self.sections:
            yield from inner.walk()

    def all_settings(self) -> list[Setting]:
        """Returns the settings of this section and of all below it."""
        return [setting for section in self.walk() for setting in section.settings]


@cache
def whole() -> Section:
    """Returns the settings of a run, without those of its components."""
    return section("", named(*RUN))


def section(key: str, declared: Class, text: str = "", *, leaving: frozenset[str] = frozenset()) -> Section:
    """Returns the section of a dataclass.

    Args:
        text: docstring of the field that holds it.
        leaving: names of fields to leave out.
    """
    settings, sections = [], []
    for each in declared.fields():
        if each.name in leaving:
            continue
        place = f"{key}.{each.name}" if key else each.name
        kind = kind_of(each.module, each.annotation)
        if kind.section:
            sections.append(section(place, kind.section, each.text))
        elif kind.entry:
            sections.append(section(f"{place}.{ENTRY}", kind.entry, each.text))
        elif place in CHOICES:
            sections.append(Section(key=place, text=each.text, components=place))
        else:
            default = COMPOSED.get(place, default_of(each))
            settings.append(Setting(key=place, kind=kind, default=default, text=each.text))
    said = declared.text if text in declared.text else f"{declared.text}\n\n{text}"
    return Section(
        key=key,
        text=said,
        components=key if key in kinds_of_components() else "",
        declared=declared,
        settings=settings,
        sections=sections,
    )


def components(key: str) -> list[str]:
    """Returns the names of the components of which a section has the settings."""
    package = CHOICES.get(key) or OPTIONS.get(key, ("",))[0]
    return registry.names(package) if package else []


def component(key: str, name: str) -> Section:
    """Returns the settings of a component that the settings of its section do not have yet."""
    topic = f"{key}.{name}"
    if key in CHOICES:
        base = next(each.declared for each in whole().walk() if each.key == key)
        known = frozenset(each.name for each in base.fields()) if base else frozenset()
        own = section(key, settings_class(f"{CHOICES[key]}.{name}"), leaving=known - {"name"})
    else:
        package, place = OPTIONS[key]
        own = section(place, settings_class(f"{package}.{name}"))
    return replace(own, title=topic, components=topic if topic in OPTIONS else "")


def kinds_of_components() -> list[str]:
    """Returns the keys that stand before the name of a component in a topic, such as algorithm."""
    return [*CHOICES, *OPTIONS]


def find(topic: str) -> Section | Setting:
    """Returns a section, a setting, or what is set of a component: `train.optimizer`, `train.optimizer.lr`,
    `algorithm.grpo`, `algorithm.grpo.correction`.

    Raises:
        UsageError: there is none; with the nearest.
    """
    run = whole()
    if found := _in(run, topic):
        return found
    for key in sorted(kinds_of_components(), key=len, reverse=True):
        name, _, rest = topic.removeprefix(f"{key}.").partition(".")
        if topic.startswith(f"{key}.") and name in components(key):
            own = component(key, name)
            if found := _in(own, f"{own.key}.{rest}" if rest else own.key):
                return found
    known = topics(run)
    ending = topic.rpartition(".")[2]
    alike = [each for each in known if each.rpartition(".")[2] == ending]
    last = get_close_matches(ending, {each.rpartition(".")[2] for each in known}, 1)
    alike = alike or [each for each in known if each.rpartition(".")[2] in last]
    near = get_close_matches(topic, alike, 1, cutoff=0.0)
    hint = f"did you mean {near[0]}?" if near else did_you_mean(topic, known)
    raise UsageError(str(Fault("--help", "must name a section, a setting or a component", got=repr(topic), hint=hint)))


def topics(run: Section) -> list[str]:
    """Returns everything that `find` finds, but for parts of components."""
    keys = [each.key for part in run.walk() for each in (part, *part.settings) if each.key]
    return keys + [f"{key}.{name}" for key in kinds_of_components() for name in components(key)]


def _in(run: Section, key: str) -> Section | Setting | None:
    each_has = ((each.key, each) for part in run.walk() for each in (part, *part.settings))
    return next((each for found, each in each_has if found == key), None)
