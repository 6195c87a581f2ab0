"""The choice whether training goes on while a checkpoint is written: `checkpoint.asynchronous`."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rlframe.loops.config import Asynchronous
from rlframe.megatron.messages.host_room import HostRoom

SHARE = 0.8
"""Fraction of a host's free memory that a copy may take with `auto`; the rest is for what a step needs beyond what it
has at a checkpoint."""


class Copied(Protocol):
    """A model in training whose state can be copied to host memory."""

    def host_room(self) -> list[tuple[str, HostRoom]]:
        """Returns what a copy needs and what is there, with the node of each rank."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A choice, and what it was made by."""

    background: bool
    """Whether training goes on."""
    said: str
    """The choice in a sentence."""


def choose(asked: Asynchronous, models: Iterable[Copied]) -> Choice:
    """Returns whether training goes on while the state of `models` is written, by the memory of their hosts now."""
    if asked is Asynchronous.FALSE:
        return Choice(background=False, said="training waits while a checkpoint is written")
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for node, room in (each for model in models for each in model.host_room()):
        needed[node] += room.needed_bytes
        free[node] = min(room.free_bytes, free.get(node, room.free_bytes))
    node = max(needed, key=lambda each: needed[each] / max(1, free[each]))
    copy = f"a copy takes {needed[node] / 1e9:.2f} GB of a host with {free[node] / 1e9:.1f} GB free"
    if asked is Asynchronous.TRUE or needed[node] <= SHARE * free[node]:
        return Choice(background=True, said=f"checkpoints are written while training goes on: {copy}")
    why = f"at most {SHARE:.0%} of that is used; checkpoint.asynchronous=true does it in any case"
    return Choice(background=False, said=f"training waits while a checkpoint is written: {copy}, and {why}")
