"""The data and the sampling of what a run evaluates, from its configuration. Imports no ray and no megatron."""

from rlframe.data.config import DataConfig
from rlframe.data.sets import settings_of
from rlframe.loops.config import EvaluationSetConfig
from rlframe.run.config import RunConfig
from rlframe.types.rollout import SamplingParams

SALT = "evaluation"
"""Decides which records a suffix `#500` of a set keeps: the same ones for every seed."""


def data_of(config: RunConfig, each: EvaluationSetConfig) -> DataConfig:
    """Returns the settings with which a set is read."""
    return settings_of(
        config.data,
        each.path,
        prompt_key=each.prompt_key,
        answer_key=each.answer_key,
        system_prompt=each.system_prompt,
    )


def greedy(config: RunConfig) -> SamplingParams:
    """Returns the sampling parameters of held-out prompts."""
    return config.rollout.sampling(greedy=True, max_tokens=config.evaluation.max_tokens)


def sampling_of(config: RunConfig, each: EvaluationSetConfig) -> SamplingParams:
    """Returns the sampling parameters of a set."""
    return each.sampling(max_tokens=greedy(config).max_tokens, stop=config.rollout.stop)
