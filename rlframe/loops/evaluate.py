"""Evaluation: greedy answers to held-out prompts, judged by the run's own rewards."""

from rlframe.loops.judging import Scorer
from rlframe.rollout.group import RolloutGroup
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Rollout, SamplingParams


def evaluate(
    rollout: RolloutGroup, judge: Scorer, prompts: list[Prompt], *, sampling: SamplingParams
) -> tuple[dict[str, float], list[Rollout]]:
    """`evaluation/...` metrics of one greedy answer per prompt, and the answers."""
    rollouts = rollout.generate(prompts, group_size=1, step=0, sampling=sampling)
    judge.score(rollouts)
    count = len(rollouts)
    names = rollouts[0].reward_parts
    metrics = {f"evaluation/{name}_mean": sum(each.reward_parts[name] for each in rollouts) / count for name in names}
    metrics["evaluation/reward_mean"] = sum(each.reward for each in rollouts) / count
    metrics["evaluation/response_tokens_mean"] = sum(sum(each.loss_mask) for each in rollouts) / count
    return metrics, rollouts
