"""The data and the sampling of what a run evaluates, from its configuration. Imports no ray and no megatron."""

from rlframe.data.config import DataConfig
from rlframe.data.sets import settings_of
from rlframe.loops.config import HELD_OUT, EvaluationSetConfig
from rlframe.rewards.config import Per
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


def comparing(config: RunConfig) -> list[str]:
    """Returns the names of the judges that compare the attempts at a prompt. One attempt alone gets no score of
    theirs."""
    return [name for name, part in config.reward.parts.items() if part.name == "judge" and part.per is Per.GROUP]


def alone(config: RunConfig) -> list[str]:
    """Returns the names of the sets whose prompts have one attempt each."""
    sets = [name for name, each in config.evaluation.sets.items() if each.samples_per_prompt == 1]
    return [*([HELD_OUT] if config.data.holds_out else []), *sets]


def caution(config: RunConfig) -> str:
    """Returns a warning about evaluations in which a judge has no say. Empty if there are none."""
    judges, sets = comparing(config), alone(config)
    if not judges or not sets:
        return ""
    return (
        f"reward.parts.{judges[0]} compares the attempts at a prompt (per=group), and has no say in evaluations with "
        f"one attempt at each: {', '.join(sets)}; judge with per=attempt what they should measure"
    )
