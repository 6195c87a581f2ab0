"""Leases: prompts taken from the stream and not yet accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlframe.attempts.ledger import Ledger
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group

NUM_LEASES = "num_leases"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A prompt of the stream that is being attempted, or whose group waits for its training."""

    ordinal: int
    """Index among all leases of the run, in the order of the stream."""
    prompt: Prompt
    epoch: int
    """The epoch of the prompt within its own dataset, from 0."""
    step: int
    """Part of the seeds: the step that a synchronous run would train it in."""
    again: int = 0
    """Part of the seeds: number of times that the step has sampled before."""
    version: int
    """Policy version when its attempts began. No token is older."""

    def description(self) -> dict[str, Any]:
        """Returns everything but the prompt, as plain JSON values."""
        return {name: getattr(self, name) for name in ("ordinal", "epoch", "step", "again", "version")}

    @property
    def group_id(self) -> str:
        """The id of its group."""
        return str(self.ordinal)

    def begin(self, size: int) -> Group:
        """Returns a group of `size` attempts without any response."""
        return Group.begin(self.group_id, self.prompt, size)


class Stream(Protocol):
    """Deals prompts in an order that can be resumed; implemented by `PromptSource`."""

    @property
    def last_epoch(self) -> int:
        """The epoch of the prompt dealt last within its own dataset, from 0."""
        ...

    def next(self, count: int) -> list[Prompt]:
        """Deals the next `count` prompts."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the position as plain JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to a position."""
        ...


class Leases:
    """Takes leases of prompts from a stream, and numbers them."""

    def __init__(self, prompts: Stream, ledger: Ledger):
        """
        Args:
            ledger: gets every lease and its end.
        """
        self.prompts, self.ledger = prompts, ledger
        self.num_taken = 0
        """Number of leases taken so far: the ordinal of the next one."""

    def take(self, count: int, *, step: int, again: int = 0, version: int) -> list[Lease]:
        """Takes leases of the next `count` prompts; see `Lease` for the arguments."""
        leases = []
        for ordinal in range(self.num_taken, self.num_taken + count):
            (prompt,) = self.prompts.next(1)
            epoch = self.prompts.last_epoch
            self.ledger.leased(ordinal, prompt=prompt.id, epoch=epoch)
            leases.append(Lease(ordinal=ordinal, prompt=prompt, epoch=epoch, step=step, again=again, version=version))
        self.num_taken += count
        return leases

    def state(self) -> dict[str, Any]:
        """Returns the position as plain JSON values."""
        return self.prompts.state() | {NUM_LEASES: self.num_taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to a position. Those of releases without leases have no number of them, and begin at 0."""
        self.num_taken = int(state.get(NUM_LEASES, 0))
        self.prompts.restore({key: value for key, value in state.items() if key != NUM_LEASES})
