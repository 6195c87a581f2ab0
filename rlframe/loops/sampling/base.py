"""Sampler: leases prompts, attempts them, and accounts for the leases after training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlframe.attempts.account.leases import Lease, Leases
from rlframe.attempts.buffer import Finished
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.turns import Task
from rlframe.loops.phases import Phases
from rlframe.loops.sampling.scoring import Scorer, score_attempts
from rlframe.types.rollout import Group, Rollout

REPLACEMENT_ROUNDS = 10
"""Greatest number of times that a step samples to replace groups none of whose attempts succeeded."""


@dataclass(kw_only=True)
class Sampler(ABC):
    """Leases prompts, attempts them and scores the responses, in the phases `rollout` and `reward`."""

    leases: Leases
    attempts: Attempts
    scorer: Scorer | None
    """Scores what the reward functions do not: a reward model. None if there is none."""
    phase: Phases
    prompts_per_step: int
    group_size: int

    @abstractmethod
    def collect(self, step: int) -> list[Group]:
        """Returns the scored groups of step `step`."""

    @property
    @abstractmethod
    def untrained(self) -> Sequence[tuple[int, int]]:
        """See GroupSource."""

    @property
    def in_flight(self) -> bool:
        """Returns whether attempts are under way between steps."""
        return False

    def __post_init__(self) -> None:
        self._taken: list[Finished] = []
        """The groups that the last `collect` returned, with their leases."""

    def settle(self, step: int) -> None:
        """Ends the leases of the groups that `collect` returned, on which the policy has been trained."""
        for each in self._taken:
            self.leases.ledger.trained(each.lease.ordinal, each.group, step=step, lost=each.lost)
        self._taken = []
        self.leases.ledger.write(step)

    def reset(self) -> None:
        """Forgets everything that is under way, and the events of the step, which is done again."""
        self._taken = []
        self.attempts.recall({})

    def hold(self, step: int) -> Callable[[Path], None]:  # noqa: ARG002 - nothing is under way between steps
        """Returns what writes to a folder what is under way after `step`: finished groups that wait, and the tokens of
        unfinished attempts. May judge, and so move the position of the prompts."""
        return lambda _: None

    def go_on(self, folder: Path) -> None:  # noqa: B027 - as hold
        """Begins again what `hold` has written, if it has."""

    def metrics(self) -> dict[str, float]:
        """Returns metrics about the last collected step that only the sampler knows."""
        return {}

    def attempt(self, count: int, *, step: int, again: int = 0) -> list[Group]:
        """Returns a scored group of `group_size` rollouts for each of the next `count` prompts.

        Args:
            again: number of times this step has sampled before; part of the seeds.
        """
        with self.phase("rollout", on=self.attempts.rollout):
            leases = self.leases.take(count, step=step, again=again, version=step - 1)
            ended = self.attempts.run([self._task(each, each.begin(self.group_size)) for each in leases])
        groups = [ended[lease.group_id].group for lease in leases]
        self.score(groups)
        for lease, group in zip(leases, groups, strict=True):
            self.leases.measure(lease, group.rollouts)
            self._taken.append(Finished(lease=lease, group=group, lost=ended[lease.group_id].lost))
        return groups

    def _task(self, lease: Lease, group: Group) -> Task:
        return self.attempts.task(group, step=lease.step, epoch=lease.epoch, again=lease.again, repeat=lease.repeat)

    def score(self, groups: Iterable[Group]) -> None:
        """Scores attempted groups by the reward model, if there is one."""
        if self.scorer:
            with self.phase("reward"):
                score_attempts(self.scorer, groups)


def sizes(sequences: Iterable[Rollout]) -> list[tuple[int, int]]:
    """Returns the tokens of each sequence, and those among them that the policy sampled."""
    return [(len(each.loss_mask), each.num_sampled_tokens) for each in sequences]
