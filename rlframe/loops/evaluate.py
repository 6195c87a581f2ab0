"""Evaluation: greedy responses to held-out prompts, scored by the run's own rewards."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlframe.attempts.fleet import Attempts
from rlframe.loops.reporting.metrics import mean_of, part_means, scored
from rlframe.loops.sampling.scoring import Scorer
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, Rollout, SamplingParams, members
from rlframe.utils.errors import RlframeError, WeightSyncFailed
from rlframe.utils.sealed import read_sealed, write_sealed
from rlframe.weight_sync.channel import WeightSync

logger = logging.getLogger(__name__)
STEP = "evaluation.json"
"""File of a checkpoint with the step whose evaluation is under way."""


def evaluate(
    attempts: Attempts, scorer: Scorer | None, prompts: list[Prompt], *, sampling: SamplingParams
) -> tuple[dict[str, float], list[Rollout]]:
    """Returns `evaluation/...` metrics of one greedy response per prompt, and the responses."""
    rollouts = members(attempts.generate(prompts, group_size=1, step=0, sampling=sampling))
    return evaluation_metrics(rollouts, scorer), rollouts


def evaluation_metrics(rollouts: list[Rollout], scorer: Scorer | None) -> dict[str, float]:
    """Returns `evaluation/...` metrics of responses, after scoring them by the reward model, if there is one.

    Where the prompts come from several datasets, `evaluation/..._mean/NAME` are those of each.
    """
    if scorer:
        scorer.score(rollouts)
    metrics = {f"evaluation/{name}_mean": value for name, value in part_means(rollouts).items()}
    for source, own in by_source(rollouts).items():
        metrics |= {f"evaluation/{name}_mean/{source}": value for name, value in part_means(own).items()}
    metrics["evaluation/reward_mean"] = mean_of(scored(rollouts))
    metrics["evaluation/response_tokens_mean"] = mean_of([each.num_sampled_tokens for each in rollouts])
    return metrics


def by_source(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    """Returns the responses by the dataset of their prompts, if there are several."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.prompt.source, []).append(rollout)
    return found if len(found) > 1 else {}


class WeightsGone(RlframeError):
    """Weights of an evaluation that nobody holds any more."""


def come_back(weight_sync: WeightSync, engines: list[int]) -> None:
    """Gives restarted engines of an evaluation the weights that sample it.

    Raises:
        WeightsGone: the trainer has moved on, and nothing holds them.
    """
    if not weight_sync.rejoin(engines):
        raise WeightsGone(
            f"engine {engines[0]} of the evaluation died, and the trainer no longer has the weights of version "
            f"{weight_sync.policy_version}; weight_sync.hold=host keeps them"
        )


@dataclass(kw_only=True)
class EvaluationBeside:
    """An evaluation during which training goes on. The weights of one step sample all of it.

    Its attempts share the engines with those of training, and it is finished before the next sync. Or they have engines
    of their own, which keep the weights until it is done.
    """

    attempts: Attempts
    prompts: list[Prompt]
    sampling: SamplingParams
    weight_sync: WeightSync | None = None
    """Sync of engines that do nothing else. None if they are shared."""
    step: int | None = None
    """The step whose evaluation is under way."""

    def begin(self, step: int) -> None:
        """Begins the evaluation of step `step`, whose weights the engines hold."""
        assert self.step is None, f"the evaluation of step {self.step} is under way"
        if not self.prompts:
            return
        if self.weight_sync and self.weight_sync.policy_version != step:
            self.weight_sync.publish(version=step)
        self.step = step
        groups = [Group.begin(name, prompt, 1) for name, prompt in zip(self._names(), self.prompts, strict=True)]
        self.attempts.start([self.attempts.task(group, step=0, sampling=self.sampling, aside=True) for group in groups])

    @property
    def must_end(self) -> bool:
        """Returns whether the evaluation that is under way must be waited for before the next sync, or is done."""
        if self.step is None or self.weight_sync is None:
            return self.step is not None
        try:
            return self.attempts.have_ended(self._names())
        except WeightsGone as error:
            self._leave_out(error)
            return False

    def finish(self) -> list[Rollout] | None:
        """Waits for the evaluation that is under way and returns its responses, in the order of the prompts. None if an
        engine died and its weights are gone, so that it is left out.

        Raises:
            WeightSyncFailed: weights of another step sampled a token.
        """
        names = self._names()
        try:
            ended = self.attempts.finish(names)
        except WeightsGone as error:
            self._leave_out(error)
            return None
        rollouts = members(ended[name].group for name in names)
        for rollout in rollouts:
            if (others := rollout.versions[rollout.loss_mask & (rollout.versions != self.step)]).size:
                raise WeightSyncFailed(
                    f"weights of version {others[0]} sampled a response of the evaluation of step {self.step}"
                )
        self.step = None
        return rollouts

    def _leave_out(self, error: WeightsGone) -> None:
        logger.warning("the evaluation of step %s is left out: %s", self.step, error)
        self.step = None

    def reattach(self, version: int) -> None:
        """Makes the engines' own sync, if there is one, read from the policy's new ranks."""
        if self.weight_sync:
            self.weight_sync.reattach(version=version)

    def metrics(self) -> dict[str, float]:
        """Returns the restarts of engines that do nothing else, if there are any such engines."""
        return {"evaluation/engine_restarts": float(self.attempts.rollout.num_restarts)} if self.weight_sync else {}

    def forget(self) -> None:
        """Forgets the evaluation that is under way, with all other attempts."""
        if self.step is not None:
            self.attempts.cancel()
            self.step = None

    def hold(self, folder: Path) -> None:
        """Writes to `folder` which step's evaluation is under way, if there is one."""
        if self.step is not None:
            write_sealed(folder / STEP, {"step": self.step})

    def go_on(self, folder: Path, *, is_done: Callable[[int], bool]) -> None:
        """Begins the evaluation again that `hold` has written, if it has.

        Args:
            is_done: returns whether the evaluation of a step was finished after that.
        """
        if (folder / STEP).exists() and not is_done(step := int(read_sealed(folder / STEP)["step"])):
            self.begin(step)

    def _names(self) -> list[str]:
        return [f"evaluation.{self.step}.{index}" for index in range(len(self.prompts))]
