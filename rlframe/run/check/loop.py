"""Rules about the loop: learning, evaluation, checkpoints."""

import os
from collections.abc import Iterator
from pathlib import Path

from rlframe.attempts.sessions.calls import CannotStart, Setup
from rlframe.attempts.sessions.pool import try_start
from rlframe.environments.base import find_environment, rewards
from rlframe.loops.config import HELD_OUT
from rlframe.loops.saving.manifest import named_checkpoints
from rlframe.megatron.config.mtp import MtpMode, in_head
from rlframe.rollout.base.config import OversampleRest
from rlframe.run.check.context import algorithm_of, evaluates, online, samples
from rlframe.run.config import RunConfig
from rlframe.run.evaluation import alone, comparing
from rlframe.types.results import Output
from rlframe.utils import outside
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

DISTRIBUTED_CHECKPOINT = (".metadata", "metadata.json")
"""Files of every Megatron distributed checkpoint."""
ADAPTERS = "lora."
"""Beginning of the names of adapters in one."""


def evaluation(run: RunConfig) -> Iterator[Fault]:
    """Checks that evaluation has data."""
    if run.evaluation.every_steps and not evaluates(run):
        why = "data.evaluation_count=0"
        if run.data.evaluation_count:
            why = "data.streaming=true and no data.evaluation_path"
        yield Fault(
            "evaluation.every_steps",
            f"has no effect with {why}",
            got=run.evaluation.every_steps,
            hint="hold out records or set it to 0",
        )


def evaluation_engines(run: RunConfig) -> Iterator[Fault]:
    """Checks that some engines can evaluate while others sample for training."""
    count = run.evaluation.num_engines
    if not count or not samples(run):
        return
    if run.cluster.colocate or run.loop.max_policy_lag == 0:
        turns = "cluster.colocate=true" if run.cluster.colocate else "loop.max_policy_lag=0"
        yield Fault(
            "evaluation.num_engines",
            f"must be 0 with {turns}",
            got=count,
            why="training waits for evaluations there, and all engines can do them",
            hint="set cluster.colocate=false and loop.max_policy_lag above 0",
        )
    if count >= run.rollout.num_engines:
        yield Fault(
            "evaluation.num_engines",
            f"must be below rollout.num_engines={run.rollout.num_engines}",
            got=count,
            why="they are some of those engines, and at least one must sample for training",
        )


def learning(run: RunConfig) -> Iterator[Fault]:
    """Checks that an algorithm that learns from rewards has one, and that its settings fit the run."""
    if online(run) and algorithm_of(run).needs_rewards and not (run.reward_names or rewards(run.environment)):
        yield Fault(
            "reward.parts",
            "must name a reward, or reward.model.path a reward model",
            why=f"algorithm.name={run.algorithm.name} learns from nothing else",
        )
    yield from algorithm_of(run).cross_faults(run.facts)


def lag(run: RunConfig) -> Iterator[Fault]:
    """Checks that engines can sample while the policy trains, where they are to."""
    if not samples(run) or not run.loop.max_policy_lag:
        return
    if run.cluster.colocate and not carries_over(run):
        yield Fault(
            "loop.max_policy_lag",
            "must be 0 with cluster.colocate=true",
            got=run.loop.max_policy_lag,
            why="policy and engines share devices and take turns, so that nothing is sampled while the policy trains",
            hint="set cluster.colocate=false, which gives the engines devices of their own, or carry unfinished groups "
            "over with rollout.oversample",
        )
    if not algorithm_of(run).requirements.samples_ahead:
        yield Fault(
            "loop.max_policy_lag",
            f"must be 0 with algorithm.name={run.algorithm.name}, with these settings",
            got=run.loop.max_policy_lag,
            why="its sampler makes the batch of one step at a time",
        )


def carries_over(run: RunConfig) -> bool:
    """Returns whether a step leaves groups unfinished, which go on in the next one."""
    return run.rollout.oversample > 1 and run.rollout.oversample_rest is OversampleRest.CARRY


def oversampling(run: RunConfig) -> Iterator[Fault]:
    """Checks that a step can begin more groups than it trains on, and what becomes of the others."""
    factor, lag = run.rollout.oversample, run.loop.max_policy_lag
    if not samples(run) or factor == 1:
        return
    if not algorithm_of(run).requirements.samples_ahead:
        yield Fault(
            "rollout.oversample",
            f"must be 1 with algorithm.name={run.algorithm.name}, with these settings",
            got=factor,
            why="its sampler makes the batch of one step at a time",
        )
    if not run.cluster.colocate and (lag or carries_over(run)):
        yield Fault(
            "rollout.oversample",
            "must be 1 with cluster.colocate=false, unless groups are dropped at loop.max_policy_lag=0",
            got=factor,
            why="with a lag engines sample for later steps while the policy trains, and a step takes what is done",
            hint="set loop.max_policy_lag and loop.pipeline_depth in its place, or rollout.oversample_rest=drop",
        )
    elif carries_over(run) and lag == 0:
        yield Fault(
            "loop.max_policy_lag",
            "must be at least 1 with rollout.oversample_rest=carry",
            got=lag,
            why="the tokens of a group that is carried over are older than the policy that trains on them",
            hint="or set rollout.oversample_rest=drop",
        )
    elif carries_over(run) and factor > lag + 1:
        yield Fault(
            "rollout.oversample",
            f"must be at most {lag + 1} with loop.max_policy_lag={lag}",
            got=factor,
            why="the policy could not train on more groups before their tokens are too old",
        )


def environment(run: RunConfig) -> Iterator[Fault]:
    """Checks that the environment exists and has the given options."""
    if not online(run):
        return
    try:
        component, settings = find_environment(run.environment)
    except ConfigError as error:
        yield from error.faults
        return
    yield from component.faults(settings, run.environment)
    if component.answers:
        setup = Setup(environment=run.environment, folder=os.getcwd(), sources=dict(outside.SOURCES))
        try:
            with run.cluster.runtime_env.here():
                try_start(setup)
        except CannotStart as error:
            if run.cluster.runtime_env.pip:
                # It may need what only the nodes get.
                return
            yield Fault("environment.name", said=f"sessions of {run.environment.name!r} cannot start: {error}")


def offline(run: RunConfig) -> Iterator[Fault]:
    """Checks that reference logprobs are computed before training only if that saves a model in memory, and that states
    are the same in both passes of an embedding's step."""
    if not online(run) and run.train.lora and algorithm_of(run).precomputes_reference:
        yield Fault(
            "algorithm.reference",
            "must be live with train.lora",
            got="precomputed",
            why="the reference is the model without its adapters, which the ranks hold anyway",
        )
    if run.train.lora and run.train.lora.dropout and algorithm_of(run).output is Output.STATES:
        yield Fault(
            "train.lora.dropout",
            f"must be 0 with algorithm.name={run.algorithm.name}",
            got=run.train.lora.dropout,
            why="the loss is that of states without dropout, so that the gradient of states with it would not be its",
            hint="remove it",
        )


def reference(run: RunConfig) -> Iterator[Fault]:
    """Checks that a reference that is to follow the policy exists, can follow it and does."""
    algorithm = algorithm_of(run)
    every = algorithm.reference_update.every_steps
    if not every:
        return
    if not algorithm.needs_reference:
        yield Fault(
            "algorithm.reference_update.every_steps",
            "has no effect without a reference",
            got=every,
            hint="set algorithm.kl_coefficient above 0, or remove it",
        )
    if run.train.lora:
        yield Fault(
            "algorithm.reference_update.every_steps",
            "must be 0 with train.lora",
            got=every,
            why="the reference is the model without its adapters, which is not trained",
            hint="train all weights",
        )
    warmup = algorithm.requirements.critic_warmup_steps
    if every >= run.steps - warmup > 0:
        yield Fault(
            "algorithm.reference_update.every_steps",
            f"must be below steps={run.steps}" + (f" less algorithm.critic_warmup_steps={warmup}" if warmup else ""),
            got=every,
            why="the reference would never move before the last step",
        )


def distillation(run: RunConfig) -> Iterator[Fault]:
    """Checks that the data's responses are learned at the temperature of the trainer's logprobs."""
    required = algorithm_of(run).requirements
    if required.nll_coefficient and required.online and run.rollout.temperature != 1:
        yield Fault(
            "algorithm.nll_coefficient",
            f"needs rollout.temperature=1, got {run.rollout.temperature}",
            got=required.nll_coefficient,
            why="the trainer computes logprobs at that temperature, but the likelihood of the data is at 1",
            stated=True,
        )


def checkpoint(run: RunConfig) -> Iterator[Fault]:
    """Checks that the checkpoint to start from exists, unless the run goes on from one of its own and needs neither a
    reference nor the base of adapters."""
    algorithm = algorithm_of(run)
    goes_on = any(named_checkpoints(run.folder / "checkpoints"))
    has_reference = algorithm.needs_reference or algorithm.precomputes_reference
    keeps_first_weights = has_reference or run.train.lora is not None
    if run.checkpoint.start_from is None or (goes_on and not keeps_first_weights):
        return
    folder = Path(run.checkpoint.start_from).expanduser()
    if missing := [name for name in DISTRIBUTED_CHECKPOINT if not (folder / name).is_file()]:
        # Of a run's folder, of its checkpoints, or of one of them.
        inside = [each for place in ("checkpoints/step-*", "step-*", ".") for each in folder.glob(f"{place}/training")]
        inside.sort()
        yield Fault(
            "checkpoint.start_from",
            "must be the folder of a Megatron distributed checkpoint",
            got=f"{folder}, which has no {' and no '.join(missing)}",
            hint=f"write checkpoint.start_from={inside[-1]}" if inside else "set model.path for a Hugging Face model",
        )
    else:
        yield from _lacking(run.train.mtp.mode, folder)


def _lacking(mtp: MtpMode, folder: Path) -> Iterator[Fault]:
    """Rejects a checkpoint of adapters alone, and one without the head for multi-token prediction that a run keeps."""
    from rlframe.megatron.checkpoint.metadata import read_metadata  # noqa: PLC0415 - imports seconds of torch

    key = "checkpoint.start_from"
    try:
        names = list(read_metadata(folder).state_dict_metadata)
    except CheckpointError as error:
        yield Fault(key, said=error)
        return
    if any(name.startswith(ADAPTERS) for name in names):
        yield Fault(
            key,
            "must hold a model",
            got=f"{folder}, which holds the adapters of a run with train.lora, without the model below them",
            hint="set model.path to that run's model/, which has them merged",
        )
    elif mtp is not MtpMode.DROP and not any(map(in_head, names)):
        why = f"{key}={folder} has no head for multi-token prediction"
        yield Fault("train.mtp.mode", "must be drop", got=mtp, why=why, hint="or start from another checkpoint")


def best_metric(run: RunConfig) -> Iterator[Fault]:
    """Checks that the metric that chooses checkpoints is one of an evaluation that there is."""
    metric = run.checkpoint.best_metric
    if metric is None or not metric.startswith("evaluation/") or run.rollout.replay is not None:
        return
    key, (first, _, rest) = "checkpoint.best_metric", metric.removeprefix("evaluation/").partition("/")
    names = list(run.evaluation.sets)
    where, number = (first, rest) if rest and first in names else (HELD_OUT, metric.removeprefix("evaluation/"))
    if where in alone(run) and number.partition("/")[0] in _never_scored(run):
        rule = (
            f"is not measured where {where} has one attempt at each prompt, which a judge with per=group cannot compare"
        )
        yield Fault(key, rule, got=metric, hint="name a metric that is measured, or judge with per=attempt")
        return
    if rest and first in names:
        return
    # `reward_mean/SOURCE` is of the held-out prompts of one dataset.
    if rest and online(run) and not first.endswith("_mean"):
        rule = f"must be of a set of evaluation.sets, {', '.join(names) or 'of which there is none'}"
        yield Fault(key, rule, got=metric, hint=did_you_mean(first, names))
    elif not run.data.holds_out:
        yield Fault(
            key,
            "is not measured where nothing is held out",
            got=metric,
            hint="set data.evaluation_count, or name evaluation/SET/... of a set of evaluation.sets",
        )


def _never_scored(run: RunConfig) -> Iterator[str]:
    """Yields the means of rewards that an attempt alone never gets."""
    judges = comparing(run)
    yield from (f"{name}_mean" for name in judges)
    if judges == run.reward_names and not rewards(run.environment):
        yield "reward_mean"
