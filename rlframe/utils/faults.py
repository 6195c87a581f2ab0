"""Faults of a configuration as data: the setting, the rule, the value and what to do. They become text only where a
person reads them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


class Key(tuple[str | int, ...]):
    """The path of a setting: names of sections and of the field, and indices of lists. Its text is dotted."""

    @classmethod
    def of(cls, dotted: str) -> Self:
        """Returns the path of a dotted text such as `train.optimizer.lr`."""
        return cls(dotted.split(".")) if dotted else cls()

    def __str__(self) -> str:
        return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in self).removeprefix(".")

    def below(self, section: tuple[str | int, ...]) -> "Key":
        """Returns the path of the same setting in a section at `section`."""
        return Key((*section, *self))

    def moved(self, homes: Mapping[str, str]) -> "Key":
        """Returns the path with its first beginning that is a key of `homes` replaced by the value."""
        for old, new in homes.items():
            if self[: len(beginning := Key.of(old))] == beginning:
                return Key(self[len(beginning) :]).below(Key.of(new))
        return self


Text = str | tuple[str | Key, ...]
"""A text, or a sequence of texts and of keys of other settings, which are moved together with the fault's key."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one setting.

    Example:
        >>> str(Fault("train.epochs_per_batch", "must be at least 1", got=0, hint="remove it"))
        'train.epochs_per_batch must be at least 1, got 0; remove it'
    """

    key: Key | str
    """Key of the setting. A dotted text becomes the path. Empty if the fault belongs to no single setting."""
    rule: Text = ""
    """The rule, without the setting's name."""
    got: Any = ""
    """The value as shown in the sentence, converted to text as in YAML. Empty if there is nothing to show."""
    why: Text = ""
    hint: Text = ""
    """Advice to the user."""
    stated: bool = False
    """Whether the sentence begins with `key=got`."""
    said: str | Exception = ""
    """Text of a part that knows no settings, which replaces the rule. An error becomes its text."""

    def __post_init__(self) -> None:
        if not isinstance(self.key, Key):
            object.__setattr__(self, "key", Key.of(self.key))
        object.__setattr__(self, "said", str(self.said))
        object.__setattr__(self, "got", shown(self.got))

    def __str__(self) -> str:
        key = str(self.key)
        subject = f"{key}={self.got}" if self.stated else key
        why, hint = (f"{mark}{_words(text)}" if text else "" for mark, text in ((": ", self.why), ("; ", self.hint)))
        if self.said:
            return f"{subject}: {self.said}{hint}" if subject else f"{self.said}{hint}"
        got = f", got {self.got}" if self.got and not self.stated else ""
        return f"{subject} {_words(self.rule)}{got}{why}{hint}".lstrip()

    @property
    def section(self) -> str:
        """The first name of the key, or an empty text."""
        assert isinstance(self.key, Key)
        return str(self.key[0]) if self.key else ""

    def below(self, section: tuple[str | int, ...]) -> "Fault":
        """Returns the fault of the same setting in a section at `section`."""
        assert isinstance(self.key, Key)
        return replace(self, key=self.key.below(section))

    def noted(self, note: str) -> "Fault":
        """Returns the fault with a note at the end of its reason."""
        assert self.said, "a rule has its hint"
        return replace(self, said=f"{self.said} {note}")

    def moved(self, homes: Mapping[str, str]) -> "Fault":
        """Returns the fault with its keys moved: `{"train": "critic.train"}`."""
        assert isinstance(self.key, Key)
        texts = {name: _moved(getattr(self, name), homes) for name in ("rule", "why", "hint")}
        return replace(self, key=self.key.moved(homes), **texts)


def shown(value: Any) -> str:
    """Returns a value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_faults(faults: Iterable[Fault | str]) -> Iterator[Fault]:
    """Yields the faults. A plain sentence becomes a fault of no single setting."""
    for fault in faults:
        yield fault if isinstance(fault, Fault) else Fault("", said=fault)


def _words(text: Text) -> str:
    return text if isinstance(text, str) else "".join(map(str, text))


def _moved(text: Text, homes: Mapping[str, str]) -> Text:
    return text if isinstance(text, str) else tuple(x.moved(homes) if isinstance(x, Key) else x for x in text)
