"""Rules about the modes, and about sets of prompts that are evaluated or answered. See the package."""

from collections.abc import Iterator
from dataclasses import replace

from rlframe.data import builtin
from rlframe.data.config import DataConfig
from rlframe.data.sets import read, settings_of
from rlframe.data.storage.sequences import Joined
from rlframe.loops.self_test.checks import find_checks
from rlframe.rewards.extracting import try_extracting
from rlframe.run.check.context import evaluates, online, samples
from rlframe.run.check.data import nothing_to_judge, template_faults
from rlframe.run.check.roles.reward import needing_answers
from rlframe.run.config import Mode, RunConfig
from rlframe.run.evaluation import SALT, data_of
from rlframe.utils.errors import ConfigError, DataError, RewardError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean


def mode(run: RunConfig) -> Iterator[Fault]:
    """Checks that engines can load what they are to evaluate or to generate with, and that there is something."""
    if run.mode is Mode.TRAIN:
        return
    if run.mode is Mode.EVALUATE and not evaluates(run):
        yield Fault(
            "data.evaluation_count",
            "must be above 0 with mode=evaluate",
            got=run.data.evaluation_count,
            why="nothing is held out, so that there is nothing to evaluate",
            hint="or name a set with evaluation.sets.NAME.path" if online(run) else "",
        )
    if run.mode is Mode.SELF_TEST:
        yield from _self_test(run)
    elif not run.trains(online=online(run)):
        yield from _without_ranks(run)


def _self_test(run: RunConfig) -> Iterator[Fault]:
    """Checks that there are the checks that are named, and that engines sample."""
    try:
        find_checks(without=run.self_test.without, further=run.self_test.further_checks)
    except ConfigError as error:
        yield from error.faults
    if run.rollout.replay is not None:
        why = "it compares the trainer with engines, and a replay starts none"
        yield Fault("rollout.replay", "must be null with mode=self_test", got=run.rollout.replay, why=why)


def _without_ranks(run: RunConfig) -> Iterator[Fault]:
    """Checks that engines can load the model themselves."""
    if run.rollout.replay is not None:
        yield Fault("rollout.replay", f"has no effect with mode={run.mode}", got=run.rollout.replay, hint="remove it")
    if run.checkpoint.start_from is not None:
        yield Fault(
            "checkpoint.start_from",
            f"must be null with mode={run.mode}",
            got=run.checkpoint.start_from,
            why="engines load the model themselves, from a folder in Hugging Face format",
            hint="convert it with python -m rlframe.tools.convert, and set model.path",
        )


def sets(run: RunConfig) -> Iterator[Fault]:
    """Checks that the records of each set can be read, rendered and judged."""
    if not samples(run) or run.mode is Mode.GENERATE:
        return
    for name, each in run.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        data = data_of(run, each)
        yield from _data(run, data, part=builtin.Split.HELD_OUT, salt=SALT, key=f"{key}.path", answers=key)
        if each.majority is not None:
            yield from _majority(run, each.majority, key=f"{key}.majority")


def _majority(run: RunConfig, part: str, *, key: str) -> Iterator[Fault]:
    """Checks that there is a reward part of this name, which reads answers from responses."""
    names = list(run.reward.parts)
    if part not in names:
        rule = f"must be one of reward.parts, {', '.join(names) or 'of which there is none'}"
        yield Fault(key, rule, got=repr(part), hint=did_you_mean(part, names))
        return
    try:
        try_extracting(run.reward, part)
    except (RewardError, ConfigError) as error:
        yield Fault(key, "must name a reward part that says which answer a response gives", got=part, why=str(error))


def prompts(run: RunConfig) -> Iterator[Fault]:
    """Checks that the records of mode=generate can be read and rendered."""
    if run.mode is Mode.GENERATE:
        data = settings_of(run.data, run.data.path)
        yield from _data(run, data, part=builtin.Split.TRAIN, salt=f"subset {run.seed}", key="data.path")


def _data(
    run: RunConfig, data: DataConfig, *, part: builtin.Split, salt: str, key: str, answers: str = ""
) -> Iterator[Fault]:
    """Checks a dataset of prompts.

    Args:
        key: dotted key of its path.
        answers: section whose `answer_key` names the answers that rewards need. Empty if they may be missing.
    """
    try:
        readings = Joined(read(data, part=part, salt=salt))
    except ConfigError as error:
        yield from error.faults
        return
    except DataError as error:
        yield Fault(key, said=error)
        return
    if answers:
        for fault in nothing_to_judge(readings, needing_answers(run), what=data.what):
            yield fault.moved({"data": answers})
    yield from template_faults(replace(run, data=data), readings, generation_prompt=True)
