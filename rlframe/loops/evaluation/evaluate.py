"""Evaluation: responses to held-out prompts, scored by the run's own rewards."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from rlframe.attempts.fleet import Attempts
from rlframe.attempts.turns import Task
from rlframe.loops.config import HELD_OUT
from rlframe.loops.evaluation.sets import Evaluated, EvaluationSet, scored_attempts
from rlframe.loops.reporting.metrics import mean_of, part_means, scored, trouble_fractions
from rlframe.loops.sampling.scoring import Scorer, score_attempts
from rlframe.types.rollout import Group, Rollout, attempts_in, members
from rlframe.utils.errors import RlframeError, WeightSyncFailed
from rlframe.utils.files.sealed import read_sealed, write_sealed
from rlframe.weight_sync.channel import WeightSync

logger = logging.getLogger(__name__)
MOST_OPEN = 4096
"""Greatest number of attempts under way of what has no limit of time altogether."""
STEP = "evaluation.json"
"""File of a checkpoint with the step whose evaluation is under way."""


def evaluate(attempts: Attempts, scorer: Scorer | None, sets: Sequence[EvaluationSet]) -> list[Evaluated]:
    """Returns scored attempts at the prompts of all sets."""
    ended = attempts.run([task for each in sets for task in tasks_of(attempts, each, step=0)])
    groups = {name: each.group for name, each in ended.items()}
    # After all sampling: a reward model may need the memory of the engines.
    return [judged(each, groups_of(each, groups, step=0), scorer) for each in sets]


def evaluate_streaming(
    attempts: Attempts, scorer: Scorer | None, sets: Sequence[EvaluationSet], *, progress: bool = False
) -> list[Evaluated]:
    """Returns the same as `evaluate`, however long it takes altogether: only the limit of a wait ends it.

    Args:
        progress: whether to show a progress bar.
    """
    tasks = (task for each in sets for task in tasks_of(attempts, each, step=0))
    most_open = max(1, MOST_OPEN // max(each.samples_per_prompt for each in sets))
    groups: dict[str, Group] = {}
    total = sum(len(each.prompts) for each in sets)
    with tqdm(total=total, unit="prompt", disable=not progress, dynamic_ncols=True) as bar:
        for ended in attempts.stream(tasks, most_open=most_open):
            groups |= {group.id: group for group in ended}
            bar.update(len(ended))
    return [judged(each, groups_of(each, groups, step=0), scorer) for each in sets]


def names_of(evaluation_set: EvaluationSet, *, step: int) -> list[str]:
    """Returns the ids of the groups of a set in the evaluation of a step."""
    return [f"evaluation.{step}.{evaluation_set.name}.{index}" for index in range(len(evaluation_set.prompts))]


def tasks_of(attempts: Attempts, evaluation_set: EvaluationSet, *, step: int, aside: bool = False) -> Iterator[Task]:
    """Yields the tasks of a set in the evaluation of a step. Their seeds are the same in every step, and their events
    are not counted among those of training.

    Args:
        aside: see `Attempts.task`.
    """
    names = names_of(evaluation_set, step=step)
    for name, prompt in zip(names, evaluation_set.prompts, strict=True):
        group = Group.begin(name, prompt, evaluation_set.samples_per_prompt)
        task = attempts.task(group, step=0, sampling=evaluation_set.sampling, aside=aside)
        yield replace(task, counted=False)


def groups_of(evaluation_set: EvaluationSet, groups: Mapping[str, Group], *, step: int) -> list[Group]:
    """Returns those of `groups`, which are by id, that belong to a set, in the order of its prompts."""
    return [groups[name] for name in names_of(evaluation_set, step=step)]


def judged(evaluation_set: EvaluationSet, groups: list[Group], scorer: Scorer | None) -> Evaluated:
    """Returns the attempts at the prompts of a set, after scoring them by the reward model, if there is one, and the
    answers that vote."""
    if scorer:
        score_attempts(scorer, groups)
    return Evaluated(set=evaluation_set, groups=groups, answers=answers_of(evaluation_set, groups))


def answers_of(evaluation_set: EvaluationSet, groups: Sequence[Group]) -> list[list[str | None]] | None:
    """Returns the answers of the scored attempts of each group. None for a set without maj@k."""
    if evaluation_set.answers is None:
        return None
    attempts = [scored_attempts(group) for group in groups]
    found = iter(evaluation_set.answers([each for own in attempts for each in own]))
    return [[next(found) for _ in own] for own in attempts]


def metrics_of(evaluated: Iterable[Evaluated]) -> dict[str, float]:
    """Returns the metrics of an evaluation: `evaluation/...` of the held-out prompts of the training data, and
    `evaluation/NAME/...` of each set with a name."""
    metrics: dict[str, float] = {}
    for each in evaluated:
        if each.set.name == HELD_OUT:
            metrics |= evaluation_metrics(members(each.groups))
            # What is lost is in no mean: without this number the others would look whole.
            metrics |= {"evaluation/lost_attempts": float(each.num_lost)} if each.num_lost else {}
        else:
            metrics |= {f"evaluation/{each.set.name}/{name}": value for name, value in each.metrics().items()}
    return metrics


def evaluation_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Returns `evaluation/...` metrics of scored responses to held-out prompts.

    Where the prompts come from several datasets, `evaluation/..._mean/NAME` are those of each.
    """
    attempts = attempts_in(rollouts)
    metrics = {f"evaluation/{name}_mean": value for name, value in part_means(attempts).items()}
    for source, own in by_source(rollouts).items():
        metrics |= {f"evaluation/{name}_mean/{source}": value for name, value in part_means(attempts_in(own)).items()}
    metrics["evaluation/reward_mean"] = mean_of(scored(attempts))
    metrics["evaluation/response_tokens_mean"] = mean_of([each.num_sampled_tokens for each in rollouts])
    # Failed rewards count as 0, and what a judge skips is left out: without these numbers the means would look whole.
    last = [own[-1] for own in attempts]
    failed = mean_of([each.reward_failed for each in last])
    metrics |= {"evaluation/reward_failed_fraction": failed} if failed > 0 else {}
    return metrics | {f"evaluation/{name}": value for name, value in trouble_fractions(last).items()}


def by_source(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    """Returns the responses by the dataset of their prompts, if there are several."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.prompt.dataset or rollout.prompt.source, []).append(rollout)
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
    sets: Sequence[EvaluationSet]
    weight_sync: WeightSync | None = None
    """Sync of engines that do nothing else. None if they are shared."""
    step: int | None = None
    """The step whose evaluation is under way."""

    def begin(self, step: int) -> None:
        """Begins the evaluation of step `step`, whose weights the engines hold."""
        assert self.step is None, f"the evaluation of step {self.step} is under way"
        if not self.sets:
            return
        if self.weight_sync and self.weight_sync.policy_version != step:
            self.weight_sync.publish(version=step)
        self.step = step
        tasks = [task for each in self.sets for task in tasks_of(self.attempts, each, step=step, aside=True)]
        self.attempts.start(tasks)

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

    def finish(self) -> list[list[Group]] | None:
        """Waits for the evaluation that is under way and returns the groups of each set, in the order of the prompts.
        None if an engine died and its weights are gone, so that it is left out.

        Raises:
            WeightSyncFailed: weights of another step sampled a token.
        """
        assert self.step is not None
        try:
            ended = self.attempts.finish(self._names())
        except WeightsGone as error:
            self._leave_out(error)
            return None
        groups = {name: each.group for name, each in ended.items()}
        for rollout in members(groups.values()):
            if (others := rollout.versions[rollout.loss_mask & (rollout.versions != self.step)]).size:
                raise WeightSyncFailed(
                    f"weights of version {others[0]} sampled a response of the evaluation of step {self.step}"
                )
        found = [groups_of(each, groups, step=self.step) for each in self.sets]
        self.step = None
        return found

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
        assert self.step is not None
        return [name for each in self.sets for name in names_of(each, step=self.step)]
