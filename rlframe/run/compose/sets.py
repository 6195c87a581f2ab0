"""Composes the sets of prompts that a run evaluates."""

from rlframe.data import builtin
from rlframe.data.config import DataConfig
from rlframe.data.prompts import PromptSource
from rlframe.data.sets import read_prompts, settings_of
from rlframe.loops.config import EvaluationSetConfig
from rlframe.loops.evaluation_sets import EvaluationSet
from rlframe.run.compose.parts import Parts
from rlframe.run.config import RunConfig
from rlframe.types.rollout import SamplingParams

SALT = "evaluation"
"""Decides which records a suffix `#500` of a set keeps: the same ones for every seed."""


def evaluation_sets(parts: Parts, prompts: PromptSource | None) -> list[EvaluationSet]:
    """Returns the sets to evaluate: the held-out prompts of the training data, if there are any, and those of
    `evaluation.sets`.

    Args:
        prompts: the training data. None if nothing is held out of it.
    """
    config = parts.config
    held_out = prompts.evaluation_prompts() if prompts else []
    found = [EvaluationSet(prompts=held_out, sampling=greedy(config))] if held_out else []
    for name, each in config.evaluation.sets.items():
        data = data_of(config, each)
        own, _ = read_prompts(data, tokenizer=parts.tokenizer, part=builtin.Split.HELD_OUT, salt=SALT)
        found.append(
            EvaluationSet(
                name=name,
                prompts=own,
                sampling=each.sampling(max_tokens=greedy(config).max_tokens, stop=config.rollout.stop),
                samples_per_prompt=each.samples_per_prompt,
                solved_reward=each.solved_reward,
            )
        )
    return found


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
