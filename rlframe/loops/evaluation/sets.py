"""Sets of prompts that are evaluated: their settings of sampling, and the metrics of their responses."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlframe.loops.config import HELD_OUT
from rlframe.loops.reporting.metrics import environment_metrics, mean_of, means_by_name, part_means, trouble_fractions
from rlframe.ops.statistics.majority import elected
from rlframe.ops.statistics.pass_at_k import pass_at_k, sizes_up_to, standard_error
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, Rollout, SamplingParams, attempts_in, by_attempt, members, reward_of


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """Prompts that are evaluated together."""

    name: str = HELD_OUT
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    samples_per_prompt: int = 1
    solved_reward: float = 1.0
    """Least reward of an attempt that counts as solved."""
    answers: Callable[[Sequence[Rollout]], list[str | None]] | None = None
    """Returns the answers that attempts give, which vote; None without maj@k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The scored attempts at the prompts of a set."""

    set: EvaluationSet
    groups: list[Group]
    answers: list[list[str | None]] | None = None
    """Answers of the scored attempts of each group; None without maj@k."""

    @property
    def num_lost(self) -> int:
        """Number of attempts that failed or took too long, and are left out of every metric."""
        expected = len(self.set.prompts) * self.set.samples_per_prompt
        return expected - sum(len(by_attempt(group.rollouts)) for group in self.groups)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the attempts, without a prefix.

        `reward_mean` is the mean over prompts of the mean over a prompt's scored attempts: avg@n with n samples per
        prompt. So are those of the parts. With several samples per prompt there are also `pass_at_K` for some K up to
        n, over the prompts of which so many attempts were scored; with `answers` also `maj_at_K`: whether the
        majority's answer of the first K scored attempts is solved. `..._error` is the standard error. Numbers that
        environments gave follow, with `environment_` before a name that is taken.
        """
        rewards = [rewards_of(group) for group in self.groups]
        rollouts = members(self.groups)
        attempts = attempts_in(rollouts)
        means = [mean_of(own) for own in rewards if own]
        parts = [part_means(by_attempt(group.rollouts)) for group in self.groups]
        metrics = {f"{name}_mean": value for name, value in means_by_name(parts).items()}
        metrics |= {"reward_mean": mean_of(means), "reward_error": standard_error(means)}
        if self.set.samples_per_prompt > 1:
            for k in sizes_up_to(self.set.samples_per_prompt):
                metrics |= named(f"pass_at_{k}", list(self._passed(rewards, k)))
                if self.answers is not None:
                    metrics |= named(f"maj_at_{k}", list(self._elected(rewards, self.answers, k)))
        metrics["response_tokens_mean"] = mean_of([each.num_sampled_tokens for each in rollouts])
        metrics["truncated_fraction"] = mean_of([each.finish_reason == "length" for each in rollouts])
        last = [own[-1] for own in attempts]
        metrics["reward_failed_fraction"] = mean_of([each.reward_failed for each in last])
        metrics |= trouble_fractions(last)
        metrics["lost_attempts"] = float(self.num_lost)
        given = {name.removeprefix("environment/"): value for name, value in environment_metrics(attempts).items()}
        # An environment may give a number that has the name of one of these, such as `reward`.
        return metrics | {f"environment_{name}" if name in metrics else name: value for name, value in given.items()}

    def _passed(self, rewards: Sequence[Sequence[float]], k: int) -> Iterator[float]:
        for own in rewards:
            if len(own) >= k:
                yield pass_at_k(len(own), sum(reward >= self.set.solved_reward for reward in own), k)

    def _elected(
        self, rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[str | None]], k: int
    ) -> Iterator[float]:
        for own, said in zip(rewards, answers, strict=True):
            if len(said) >= k:
                place = elected(said[:k])
                yield float(place is not None and own[place] >= self.set.solved_reward)


def scored_attempts(group: Group) -> list[Rollout]:
    """Returns the last rollout of each attempt of a group that some reward function scored."""
    return [own[-1] for own in by_attempt(group.rollouts) if not math.isnan(reward_of(own))]


def rewards_of(group: Group) -> list[float]:
    """Returns the total rewards of the attempts of a group that some reward function scored."""
    return [reward for sequences in by_attempt(group.rollouts) if not math.isnan(reward := reward_of(sequences))]


def named(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns mean and standard error of values, if there are any."""
    return {name: mean_of(values), f"{name}_error": standard_error(values)} if values else {}
