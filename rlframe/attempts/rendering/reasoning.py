"""Forms of reasoning, and how it is told from what the policy says."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlframe.attempts.rendering.formats.harmony import CHANNEL, MESSAGE, messages_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Thought:
    """A turn without and with its reasoning apart."""

    reasoning: str
    rest: str


class Style(ABC):
    """Base of all forms of reasoning."""

    markers: Sequence[str] = ()
    """Tokens that belong to reasoning. None of them ends a turn."""

    @abstractmethod
    def is_written_by(self, template: str) -> bool:
        """Returns whether the text of a chat template has this form."""

    @abstractmethod
    def is_open(self, prompt: str) -> bool:
        """Returns whether a prompt ends within reasoning that the template has begun."""

    @abstractmethod
    def split(self, text: str, *, is_open: bool) -> Thought:
        """Returns the reasoning and the rest of a turn.

        Args:
            is_open: whether the prompt ended within reasoning.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags(Style):
    """Reasoning between two tags, at the beginning of the turn."""

    opening: str
    closing: str
    label: str = ""
    """Text that follows the opening tag."""

    @property
    def markers(self) -> Sequence[str]:
        """See Style.markers."""
        return (self.opening, self.closing)

    def is_written_by(self, template: str) -> bool:
        """See Style.is_written_by. Some templates begin the reasoning of every turn, and never write its end."""
        return self.closing in template or self.opening in template

    def is_open(self, prompt: str) -> bool:
        """See Style.is_open."""
        return prompt.rstrip().endswith(self.opening + self.label)

    def split(self, text: str, *, is_open: bool) -> Thought:
        """See Style.split. Reasoning that has not ended is all reasoning. An end without a beginning is text, such as
        that of an argument."""
        if not (is_open or text.lstrip().startswith(self.opening)):
            return Thought(reasoning="", rest=text)
        before, _, after = text.partition(self.closing)
        if before.lstrip().startswith(self.opening):
            before = before.lstrip().removeprefix(self.opening).removeprefix(self.label)
        return Thought(reasoning=before.strip("\n"), rest=after.lstrip("\n"))


class Channels(Style):
    """Reasoning as messages in the channel `analysis`."""

    markers = (CHANNEL, MESSAGE)

    def is_written_by(self, template: str) -> bool:
        """See Style.is_written_by."""
        return CHANNEL in template and MESSAGE in template

    def is_open(self, prompt: str) -> bool:
        """See Style.is_open."""
        return False

    def split(self, text: str, *, is_open: bool) -> Thought:
        """See Style.split."""
        thoughts, rest = [], []
        for whole, header, body in messages_of(text):
            if header.partition(CHANNEL)[2].startswith("analysis") and "to=" not in header:
                thoughts.append(body)
            else:
                rest.append(whole)
        return Thought(reasoning="\n".join(thoughts), rest="".join(rest))


STYLES: Mapping[str, Style] = {
    "think": Tags(opening="<think>", closing="</think>"),
    "brackets": Tags(opening="[THINK]", closing="[/THINK]"),
    "gemma": Tags(opening="<|channel>", closing="<channel|>", label="thought"),
    "harmony": Channels(),
}
"""Forms of reasoning by the name in the setting."""
