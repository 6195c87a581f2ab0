"""Samplers: where the judged rollouts of a step come from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rlframe.data.prompts import PromptStream
from rlframe.loops.phases import Phases
from rlframe.rewards.judge import Judge
from rlframe.rollout.group import RolloutGroup
from rlframe.types.rollout import Rollout


@dataclass(kw_only=True)
class Sampler(ABC):
    """Draws prompts, has them answered and the answers judged, in the phases `rollout` and `reward`."""

    prompts: PromptStream
    rollout: RolloutGroup
    judge: Judge
    phase: Phases
    prompts_per_step: int
    group_size: int

    @abstractmethod
    def collect(self, step: int) -> list[Rollout]:
        """[R] judged rollouts of step `step`, ordered by prompt, `group_size` of each.

        Between steps a sampler holds nothing: whatever prompts it drew are consumed, so that the cursor of `prompts`
        is all that a checkpoint needs.
        """

    def metrics(self) -> dict[str, float]:
        """What only the sampler knows about the step it collected last."""
        return {}

    def attempt(self, count: int, *, step: int, again: int = 0) -> list[Rollout]:
        """[count * group_size] judged rollouts of the next `count` prompts.

        Args:
            again: how many times this step has sampled before; part of the seeds.
        """
        with self.phase("rollout", on=self.rollout):
            prompts = self.prompts.next(count)
            rollouts = self.rollout.generate(prompts, group_size=self.group_size, step=step, again=again)
        with self.phase("reward"):
            self.judge.score(rollouts)
        return rollouts


class PlainSampler(Sampler):
    """Every prompt once, every rollout kept."""

    def collect(self, step: int) -> list[Rollout]:
        """[P * group_size] rollouts of the next P prompts."""
        return self.attempt(self.prompts_per_step, step=step)
