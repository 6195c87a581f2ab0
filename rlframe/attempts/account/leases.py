"""Leases: prompts taken from the stream and not yet accounted for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlframe.attempts.account.ledger import DropReason, Ledger
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, Rollout

NUM_LEASES = "num_leases"
DEALT = "dealt_in_step"


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
    repeat: int = 0
    """Part of the seeds: number of times that the step has had this prompt in this epoch before, as a stream may."""
    version: int
    """Policy version when its attempts began. No token is older."""

    def description(self) -> dict[str, Any]:
        """Returns everything but the prompt, as plain JSON values."""
        return {name: getattr(self, name) for name in ("ordinal", "epoch", "step", "again", "repeat", "version")}

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


class Curriculum(Protocol):
    """Decides which prompts are dealt when; implemented by `PromptSource`."""

    def reach(self, step: int) -> None:
        """Notes the step that the next prompts are for."""
        ...

    def passes_over(self, prompt: Prompt) -> bool:
        """Returns whether a prompt that has just been dealt is left out."""
        ...

    def measure(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Notes what the attempts at a prompt were worth."""
        ...

    def metrics(self, step: int) -> dict[str, float]:
        """Returns metrics of a step, which counts since the last call."""
        ...


class Leases:
    """Takes leases of prompts from a stream, and numbers them."""

    def __init__(self, prompts: Stream, ledger: Ledger, *, curriculum: Curriculum | None = None):
        """
        Args:
            ledger: gets every lease and its end.
            curriculum: decides which prompts the stream deals. None deals all.
        """
        self.prompts, self.ledger, self.curriculum = prompts, ledger, curriculum
        self.num_taken = 0
        """Number of leases taken so far: the ordinal of the next one."""
        self._sampling = (0, 0)
        """The step and `again` of the last lease."""
        self._dealt: Counter[str] = Counter()
        """Number of leases with these of each prompt in each epoch."""

    def take(
        self, count: int, *, step: int, again: int = 0, version: int, trained_at: int | None = None
    ) -> list[Lease]:
        """Takes leases of the next `count` prompts; see `Lease` for the arguments. A lease of a prompt that the
        curriculum leaves out ends at once, and another one is taken.

        Args:
            trained_at: the step that is to train on the prompts, by which the curriculum deals them. None means `step`.
        """
        leases: list[Lease] = []
        if self.curriculum:
            self.curriculum.reach(step if trained_at is None else trained_at)
        while len(leases) < count:
            ordinal = self.num_taken
            (prompt,) = self.prompts.next(1)
            epoch = self.prompts.last_epoch
            self.num_taken += 1
            self.ledger.leased(ordinal, prompt=prompt.id, epoch=epoch)
            if self.curriculum and self.curriculum.passes_over(prompt):
                self.ledger.dropped(ordinal, DropReason.PASSED_OVER, [])
                continue
            repeat = self._repeat(f"{epoch} {prompt.id}", step=step, again=again)
            leases.append(
                Lease(
                    ordinal=ordinal,
                    prompt=prompt,
                    epoch=epoch,
                    step=step,
                    again=again,
                    repeat=repeat,
                    version=version,
                )
            )
        return leases

    def _repeat(self, name: str, *, step: int, again: int) -> int:
        """Returns how many leases of a step had this prompt before."""
        if self._sampling != (step, again):
            self._sampling = (step, again)
            self._dealt.clear()
        self._dealt[name] += 1
        return self._dealt[name] - 1

    def measure(self, lease: Lease, rollouts: Sequence[Rollout]) -> None:
        """Passes on to the curriculum what the attempts of a lease were worth."""
        if self.curriculum:
            self.curriculum.measure(lease.prompt, rollouts)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the curriculum's metrics of a step."""
        return self.curriculum.metrics(step) if self.curriculum else {}

    def state(self) -> dict[str, Any]:
        """Returns the position as plain JSON values."""
        dealt = {"sampling": list(self._sampling), "times": dict(self._dealt)}
        return self.prompts.state() | {NUM_LEASES: self.num_taken, DEALT: dealt}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to a position. Those of releases without leases have no number of them, and begin at 0."""
        self.num_taken = int(state.get(NUM_LEASES, 0))
        dealt = state.get(DEALT, {"sampling": [0, 0], "times": {}})
        self._sampling, self._dealt = tuple(dealt["sampling"]), Counter(dealt["times"])
        self.prompts.restore({key: value for key, value in state.items() if key not in (NUM_LEASES, DEALT)})
