"""Composes the sets of prompts that a run evaluates."""

from collections.abc import Sequence
from functools import partial

from rlframe.data import builtin
from rlframe.data.prompts import PromptSource
from rlframe.data.sets import read_prompts
from rlframe.loops.evaluation.sets import EvaluationSet
from rlframe.rewards.config import RewardConfig
from rlframe.rewards.extracting import extracted
from rlframe.rewards.runner import attempt_of
from rlframe.run.compose.parts import Parts
from rlframe.run.evaluation import SALT, data_of, greedy, sampling_of
from rlframe.types.rollout import Rollout


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
                sampling=sampling_of(config, each),
                samples_per_prompt=each.samples_per_prompt,
                solved_reward=each.solved_reward,
                answers=partial(_answers, config.reward, each.majority) if each.majority else None,
            )
        )
    return found


def _answers(config: RewardConfig, part: str, rollouts: Sequence[Rollout]) -> list[str | None]:
    return extracted(config, part, [attempt_of(rollout) for rollout in rollouts])
