"""The score of a reward model joins what functions say, and one that is not finite is a failed sample."""

import math
from types import SimpleNamespace

import torch

from rlframe.loops.sampling.scoring import RewardModelScorer, score_attempts
from rlframe.types.batch import Sequences
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import OFFLINE_VERSION, FinishReason, Group, Rollout


def rollout(*sampled: int) -> Rollout:
    """Prompt 7 8 and the sampled tokens."""
    count = 2 + len(sampled)
    return Rollout(
        prompt=Prompt(id="p", text="", input=ModelInput((7, 8))),
        sample_index=0,
        input=ModelInput([7, 8, *sampled]),
        loss_mask=[False, False] + [True] * len(sampled),
        rollout_logprobs=[0.0] * count,
        versions=[OFFLINE_VERSION, OFFLINE_VERSION] + [0] * len(sampled),
        finish_reason=FinishReason.STOP,
    )


def judged(rollouts: list[Rollout]) -> None:
    """Scores as one reward function would that gives 1, and fails on the second rollout."""
    for index, each in enumerate(rollouts):
        each.reward, each.reward_parts, each.reward_failed = 1.0, {"one": 1.0}, index == 1


def test_scores_are_weighted_and_named() -> None:
    events: list[str] = []

    def scores(batch: Sequences) -> torch.Tensor:
        events.append("scores")
        assert batch.token_ids.tolist() == [7, 8, 5, 2, 7, 8, 6, 7, 8, 4, 4]
        assert batch.lengths.tolist() == [4, 3, 4]
        return torch.tensor([2.0, -4.0, math.nan])

    rollouts = [rollout(5, 2), rollout(6), rollout(4, 4)]
    judged(rollouts)
    scorer = RewardModelScorer(scores=scores, weight=0.5, sleep_others=lambda: events.append("room"))
    scorer.score(rollouts)
    assert events == ["room", "scores"]
    # 1 + 0.5 * 2; 1 + 0.5 * -4; 1 and nothing of the model.
    assert [each.reward for each in rollouts] == [2.0, -1.0, 1.0]
    assert [each.reward_parts for each in rollouts] == [
        {"one": 1.0, "model": 2.0}, {"one": 1.0, "model": -4.0}, {"one": 1.0, "model": 0.0},
    ]  # fmt: skip
    assert [each.reward_failed for each in rollouts] == [False, True, True]


def test_it_may_score_alone() -> None:
    rollouts = [rollout(5)]
    RewardModelScorer(scores=lambda _: torch.tensor([3.0]), weight=2.0, sleep_others=lambda: None).score(rollouts)
    assert (rollouts[0].reward, rollouts[0].reward_parts) == (6.0, {"model": 3.0})


def test_a_score_of_weight_0_is_no_reward_of_what_nobody_scored() -> None:
    scored, unscored = rollout(5), rollout(6)
    scored.reward, unscored.reward = 1.0, math.nan
    scorer = RewardModelScorer(scores=lambda _: torch.tensor([3.0, 3.0]), weight=0.0, sleep_others=lambda: None)
    scorer.score([scored, unscored])
    assert scored.reward == 1.0 and math.isnan(unscored.reward)
    assert scored.reward_parts == unscored.reward_parts == {"model": 3.0}


def test_an_attempt_of_several_sequences_has_the_score_of_the_last_one_in_all_of_them() -> None:
    forked, alone = [rollout(5), rollout(6)], rollout(4)
    forked[1].sequence, alone.sample_index = 1, 1
    seen: list[int] = []

    def scores(batch: Sequences) -> torch.Tensor:
        seen.extend(batch.token_ids.tolist())
        return torch.tensor([3.0, 1.0])

    scorer = RewardModelScorer(scores=scores, weight=1.0, sleep_others=lambda: None)
    groups = [Group(id="0", prompt=alone.prompt, rollouts=[*forked, alone]), Group.begin("1", alone.prompt, 0)]
    score_attempts(scorer, groups)
    assert seen == [7, 8, 6, 7, 8, 4]
    assert [each.reward for each in groups[0].rollouts] == [3.0, 3.0, 1.0]
    assert forked[0].reward_parts == {"model": 3.0} and forked[0].reward_weights == {"model": 1.0}


def test_where_no_attempt_has_succeeded_there_is_nothing_to_score() -> None:
    asked: list[list[Rollout]] = []
    score_attempts(SimpleNamespace(score=asked.append), [Group.begin("0", rollout(5).prompt, 0)])
    assert not asked
