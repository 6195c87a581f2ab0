"""Evaluation: greedy responses to held-out prompts, scored by the run's own rewards."""

from rlframe.attempts.fleet import Attempts
from rlframe.loops.reporting.metrics import mean_of, part_means, scored
from rlframe.loops.sampling.scoring import Scorer
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Rollout, SamplingParams, members


def evaluate(
    attempts: Attempts, scorer: Scorer | None, prompts: list[Prompt], *, sampling: SamplingParams
) -> tuple[dict[str, float], list[Rollout]]:
    """Returns `evaluation/...` metrics of one greedy response per prompt, and the responses."""
    rollouts = members(attempts.generate(prompts, group_size=1, step=0, sampling=sampling))
    if scorer:
        scorer.score(rollouts)
    metrics = {f"evaluation/{name}_mean": value for name, value in part_means(rollouts).items()}
    metrics["evaluation/reward_mean"] = mean_of(scored(rollouts))
    metrics["evaluation/response_tokens_mean"] = mean_of([each.num_sampled_tokens for each in rollouts])
    return metrics, rollouts
