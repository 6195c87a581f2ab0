"""Samplers: the sources of a step's scored rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig, Flat, flat
from rlframe.data.prompts import PromptSource
from rlframe.loops.phases import Phases
from rlframe.loops.reporting.metrics import mean_of, scored
from rlframe.loops.scoring import Scorer
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.types.rollout import Group, Rollout, members
from rlframe.utils.errors import RlframeError


@dataclass(kw_only=True)
class Sampler(ABC):
    """Draws prompts, samples responses and scores them, in the phases `rollout` and `reward`."""

    prompts: PromptSource
    rollout: RolloutGroup
    scorer: Scorer
    phase: Phases
    prompts_per_step: int
    group_size: int

    @abstractmethod
    def collect(self, step: int) -> list[Group]:
        """Returns the scored groups of step `step`.

        Between steps a sampler holds no state: all prompts it drew are consumed, so that a checkpoint needs only the
        cursor of `prompts`.
        """

    def metrics(self) -> dict[str, float]:
        """Returns metrics about the last collected step that only the sampler knows."""
        return {}

    def attempt(self, count: int, *, step: int, again: int = 0) -> list[Group]:
        """Returns a scored group of `group_size` rollouts for each of the next `count` prompts.

        Args:
            again: number of times this step has sampled before; part of the seeds.
        """
        with self.phase("rollout", on=self.rollout):
            prompts = self.prompts.next(count)
            groups = self.rollout.generate(prompts, group_size=self.group_size, step=step, again=again)
        with self.phase("reward"):
            self.scorer.score(members(groups))
        return groups


class PlainSampler(Sampler):
    """Uses every prompt once and keeps every rollout."""

    def collect(self, step: int) -> list[Group]:
        """Returns the groups of the next P prompts."""
        return self.attempt(self.prompts_per_step, step=step)


@dataclass(kw_only=True)
class DynamicSampler(Sampler):
    """Drops and replaces groups whose rewards are all equal, until the batch is full or the rounds are used up.

    A round samples as many prompts as are missing, so that no group with a signal is wasted. Dropped prompts are
    consumed: they return in the next epoch.
    """

    dynamic: DynamicSamplingConfig
    num_minibatches: int
    """Number of groups of which a batch that does not get full keeps a multiple."""

    def __post_init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def collect(self, step: int) -> list[Group]:
        """Returns at most P groups, all with a signal.

        Raises:
            RlframeError: too few groups with a signal for an optimizer step, after all rounds.
        """
        kept: list[Group] = []
        dropped = dict.fromkeys(Flat, 0)
        sampled: list[Rollout] = []
        rounds = 0
        while len(kept) < self.prompts_per_step and rounds < self.dynamic.max_rounds:
            groups = self.attempt(self.prompts_per_step - len(kept), step=step, again=rounds)
            sampled += members(groups)
            for group in groups:
                if reason := flat(group.rollouts, self.dynamic.reward_part):
                    dropped[reason] += 1
                else:
                    kept.append(group)
            rounds += 1
        whole = len(kept) // self.num_minibatches * self.num_minibatches
        self._metrics = {
            "rollout/rounds": float(rounds),
            "rollout/sampled": float(len(sampled)),
            "reward/sampled_mean": mean_of(scored(sampled)),
            **{f"rollout/dropped_{reason}_groups": float(count) for reason, count in dropped.items()},
            "rollout/dropped_left_over_groups": float(len(kept) - whole),
        }
        if not whole:
            raise RlframeError(self._exhausted(step, rounds, dropped))
        return kept[:whole]

    def _exhausted(self, step: int, rounds: int, dropped: Mapping[Flat, int]) -> str:
        counts = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in dropped.items())
        return (
            f"step {step}: fewer than the {self.num_minibatches} groups that an update needs had "
            f"different rewards, in {rounds} rounds (algorithm.dynamic_sampling.max_rounds); groups with "
            f"equal rewards: {counts}. Use prompts that are neither too easy nor too hard, larger groups "
            "or a higher rollout.temperature"
        )

    def metrics(self) -> dict[str, float]:
        """Returns the number of rounds, the numbers of kept and dropped groups, and the mean reward of all samples."""
        return self._metrics
