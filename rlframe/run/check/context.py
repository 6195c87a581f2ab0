"""Facts about a run that the rules of several topics need."""

import importlib.util

import torch

from rlframe.algorithms.base import Algorithm, OnlineAlgorithm
from rlframe.cluster.config import Device
from rlframe.environments.base import answers
from rlframe.models import hub
from rlframe.models.families.base import Architecture
from rlframe.run.config import RunConfig
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.registry import find


def missing(package: str) -> bool:
    """Returns whether a package is not installed."""
    return importlib.util.find_spec(package) is None


def online(run: RunConfig) -> bool:
    return algorithm_of(run).online


def samples(run: RunConfig) -> bool:
    """Returns whether engines sample. Those of an online run do, unless it is a replay."""
    return online(run) and run.rollout.replay is None


def longest_rollout(run: RunConfig) -> tuple[str, int]:
    """Returns the settings that bound a rollout, and the greatest number of its tokens."""
    if not answers(run.environment):
        return "data.max_prompt_tokens + rollout.max_tokens", run.data.max_prompt_tokens + run.rollout.max_tokens
    if run.environment.max_tokens is None:
        return "environment.max_tokens=null, which means train.max_tokens_per_microbatch", run.train.sequence_tokens
    return "environment.max_tokens", min(run.environment.max_tokens, run.train.sequence_tokens)


def algorithm_of(run: RunConfig) -> Algorithm:
    component, _ = find("rlframe.algorithms", run.algorithm.name, key="algorithm.name")
    return component(run.algorithm)


def critic_of(run: RunConfig) -> Algorithm | None:
    """Returns the algorithm that trains the critic, or None if the run has no critic."""
    algorithm = algorithm_of(run)
    return algorithm.critic if isinstance(algorithm, OnlineAlgorithm) else None


def architecture_of(run: RunConfig) -> tuple[Architecture | None, list[Fault]]:
    """Returns the model's architecture, or None and why it is unknown."""
    try:
        folder = hub.resolve(run.model)
        architecture = hub.load_family(folder).architecture(hub.read_config(folder))
        return architecture.with_outputs(algorithm_of(run).model_outputs), []
    except ConfigError as error:
        return None, error.faults
    except CheckpointError as error:
        return None, [Fault("model.path", said=error)]


def on_cuda(run: RunConfig) -> bool:
    """Returns whether models and engines run on CUDA."""
    if run.cluster.device is Device.AUTO:
        return torch.cuda.is_available()
    return run.cluster.device is Device.CUDA
