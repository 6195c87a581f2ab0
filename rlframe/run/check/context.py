"""Facts about a run that the rules of several topics need."""

import importlib.util

import torch

from rlframe.algorithms.base import Algorithm, OnlineAlgorithm
from rlframe.cluster.config import Device
from rlframe.environments.base import answers
from rlframe.models import hub
from rlframe.models.families.base import Architecture
from rlframe.run.config import Mode, RunConfig
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.registry import find


def missing(package: str) -> bool:
    """Returns whether a package is not installed."""
    return importlib.util.find_spec(package) is None


def online(run: RunConfig) -> bool:
    """Returns whether the run is about what engines sample, as mode=generate is with every algorithm."""
    return run.mode is Mode.GENERATE or algorithm_of(run).online


def samples(run: RunConfig) -> bool:
    """Returns whether engines sample. Those of an online run do, unless it is a replay."""
    return online(run) and run.rollout.replay is None


def evaluates(run: RunConfig) -> bool:
    """Returns whether anything is evaluated: records that are held out, or sets of prompts."""
    return run.data.holds_out or bool(run.evaluation.sets and online(run))


def longest_rollout(run: RunConfig) -> tuple[str, int]:
    """Returns the settings that bound a rollout, and the greatest number of its tokens."""
    if not answers(run.environment):
        return "data.max_prompt_tokens + rollout.max_tokens", run.data.max_prompt_tokens + run.rollout.max_tokens
    if run.environment.max_tokens is None:
        return "environment.max_tokens=null, which means train.max_tokens_per_microbatch", run.train.sequence_tokens
    return "environment.max_tokens", min(run.environment.max_tokens, run.train.sequence_tokens)


def response_limits(run: RunConfig) -> dict[str, int]:
    """Returns the greatest number of tokens of a response, by the setting that says so."""
    if run.mode is Mode.GENERATE and run.generation.max_tokens is not None:
        return {"generation.max_tokens": run.generation.max_tokens}
    found = {"rollout.max_tokens": run.rollout.max_tokens}
    if run.mode is Mode.GENERATE:
        return found
    if run.evaluation.max_tokens is not None:
        found["evaluation.max_tokens"] = run.evaluation.max_tokens
    own = {name: each.max_tokens for name, each in run.evaluation.sets.items()}
    return found | {f"evaluation.sets.{name}.max_tokens": most for name, most in own.items() if most is not None}


def algorithm_of(run: RunConfig) -> Algorithm:
    component, _ = find("rlframe.algorithms", run.algorithm.name, key="algorithm.name")
    return component(run.algorithm)


def critic_of(run: RunConfig) -> Algorithm | None:
    """Returns the algorithm that trains the critic, or None if the run has no critic."""
    algorithm = algorithm_of(run)
    return algorithm.critic if isinstance(algorithm, OnlineAlgorithm) else None


def architecture_of(run: RunConfig) -> tuple[Architecture | None, list[Fault]]:
    """Returns the model's architecture, or None and why it is unknown."""
    generates = run.mode is Mode.GENERATE
    try:
        folder = hub.resolve(run.model)
        architecture = hub.load_family(folder).architecture(hub.read_config(folder))
        return architecture.with_outputs(None if generates else algorithm_of(run).model_outputs), []
    except ConfigError as error:
        return None, error.faults
    except CheckpointError as error:
        return None, [Fault("model.path", said=error)]


def device_of(run: RunConfig) -> Device:
    """Returns the hardware of models and engines. AUTO if only the cluster that the run joins can tell; this machine is
    then not asked, because it may have other devices than the nodes of the cluster."""
    if run.cluster.device is not Device.AUTO or run.cluster.joins:
        return run.cluster.device
    return Device.CUDA if torch.cuda.is_available() else Device.CPU
