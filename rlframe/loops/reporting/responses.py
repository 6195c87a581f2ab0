"""Responses in files: a line of JSON for each prompt."""

import math
from collections.abc import Mapping
from typing import Any

from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, Rollout, by_attempt, reward_of


def record_of(group: Group, *, num_attempts: int) -> dict[str, Any]:
    """Returns a prompt and its responses as plain JSON values.

    Args:
        num_attempts: number of attempts that were begun.
    """
    prompt, attempts = group.prompt, by_attempt(group.rollouts)
    return {
        "id": prompt.id,
        **asked_of(prompt),
        **({"answer": prompt.answer} if prompt.answer is not None else {}),
        "prompt_tokens": len(prompt.input),
        "responses": [response_of(sequences) for sequences in attempts],
        "lost": num_attempts - len(attempts),
    }


ASKED = ("messages", "prompt", "tools")
"""Names of what `asked_of` returns."""


def asked_of(prompt: Prompt) -> dict[str, Any]:
    """Returns what a prompt asks as plain JSON values."""
    return {
        **({"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}),
        **({"tools": list(prompt.tools)} if prompt.tools else {}),
    }


def response_of(sequences: list[Rollout]) -> Mapping[str, Any]:
    """Returns an attempt as plain JSON values: of one with an environment that answers, the last response and the whole
    conversation."""
    last, reward = sequences[-1], reward_of(sequences)
    judged = last.reward_parts and not math.isnan(reward)
    return {
        "text": last.text,
        "tokens": sum(each.num_sampled_tokens for each in sequences),
        "finish_reason": last.finish_reason.value,
        **({"messages": last.messages, "ending": last.ending} if last.messages else {}),
        **({"reward": reward, "reward_parts": last.reward_parts} if judged else {}),
        **({"reward_failed": True} if last.reward_failed else {}),
    }
