"""Metrics of a set of prompts with several attempts at each, worked by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlframe.loops.evaluation.evaluate import evaluate_streaming, judged, metrics_of
from rlframe.loops.evaluation.results import RESULTS, result_of, table, write_responses, write_results
from rlframe.loops.evaluation.sets import Evaluated, EvaluationSet
from rlframe.loops.reporting.metrics import is_evaluated
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams
from tests.local_attempts import LocalAttempts, answering

PROMPTS = [Prompt(id=f"p{index}", text="", input=ModelInput((index,)), answer="1") for index in range(3)]
SAMPLED = SamplingParams(max_tokens=4, temperature=1.0)
MATH = EvaluationSet(name="math", prompts=PROMPTS, sampling=SAMPLED, samples_per_prompt=4)


def group(place: int, rewards: list[float]) -> Group:
    rollouts = [
        Rollout(
            prompt=PROMPTS[place],
            sample_index=index,
            input=ModelInput((place, 1)),
            loss_mask=[False, True],
            rollout_logprobs=[0.0, -1.0],
            versions=[-1, 0],
            finish_reason=FinishReason.LENGTH if index == 0 else FinishReason.STOP,
            text="1",
            reward=reward,
            reward_parts={} if math.isnan(reward) else {"match": reward},
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id=f"{place}", prompt=PROMPTS[place], rollouts=rollouts)


# Two of four solved, none of four, and one of the two that did not fail.
EVALUATED = Evaluated(set=MATH, groups=[group(0, [1, 0, 1, 0]), group(1, [0, 0, 0, 0]), group(2, [0, 1])])


def test_metrics_of_several_attempts_at_each_prompt() -> None:
    found = EVALUATED.metrics()
    assert found["reward_mean"] == found["match_mean"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    # The means of the prompts are 1/2, 0 and 1/2: variance 1/12, over 3 prompts.
    assert found["reward_error"] == pytest.approx(math.sqrt(1 / 12 / 3))
    assert found["pass_at_1"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert found["pass_at_2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    # The prompt with two attempts says nothing about four.
    assert found["pass_at_4"] == pytest.approx((1 + 0) / 2)
    assert found["lost_attempts"] == 2
    assert found["truncated_fraction"] == pytest.approx(3 / 10)


def test_attempts_on_which_a_reward_gave_no_score_are_counted_by_trouble() -> None:
    """Of eight attempts two were judged in vain, one of them as a failure that counts as 0."""
    groups = [group(0, [1, 0, 1, 0]), group(1, [0, 0, 0, 0])]
    groups[0].rollouts[1].reward_troubles = {"judge": "unreachable"}
    groups[1].rollouts[0].reward_troubles, groups[1].rollouts[0].reward_failed = {"judge": "unparsable"}, True
    told = {"judge_unparsable_fraction": 1 / 8, "judge_unreachable_fraction": 1 / 8, "reward_failed_fraction": 1 / 8}
    assert told.items() <= Evaluated(set=MATH, groups=groups).metrics().items()
    held_out = metrics_of([Evaluated(set=replace(MATH, name="held_out"), groups=groups)])
    assert {f"evaluation/{name}": value for name, value in told.items()}.items() <= held_out.items()
    assert not [
        name for name in metrics_of([replace(EVALUATED, set=replace(MATH, name="held_out"))]) if "fraction" in name
    ]


def test_numbers_of_an_environment_take_the_place_of_no_other() -> None:
    own = group(0, [1])
    own.rollouts[0].numbers = {"reward": 0.25, "match": 3.0, "tries": 2.0}
    found = Evaluated(set=MATH, groups=[own]).metrics()
    assert (found["reward_mean"], found["match_mean"], found["tries_mean"]) == (1.0, 1.0, 2.0)
    assert (found["environment_reward_mean"], found["environment_match_mean"]) == (0.25, 3.0)


def test_attempts_that_nothing_scored_do_not_count_as_unsolved() -> None:
    found = Evaluated(set=MATH, groups=[group(0, [1, math.nan, 1, 1])]).metrics()
    assert found["reward_mean"] == 1.0 and "pass_at_4" not in found


def test_attempts_are_solved_from_a_reward_on() -> None:
    lower = EvaluationSet(name="math", prompts=PROMPTS[:1], sampling=SAMPLED, samples_per_prompt=2, solved_reward=0.5)
    found = Evaluated(set=lower, groups=[group(0, [0.5, 0.4])]).metrics()
    assert (found["pass_at_1"], found["pass_at_2"]) == (0.5, 1.0)


def test_each_set_has_its_name_in_the_metrics_and_held_out_prompts_have_none() -> None:
    held_out = Evaluated(set=EvaluationSet(prompts=PROMPTS[:1], sampling=SAMPLED), groups=[group(0, [1])])
    found = metrics_of([held_out, EVALUATED])
    assert found["evaluation/reward_mean"] == 1.0 and "evaluation/reward_error" not in found
    assert found["evaluation/math/reward_mean"] == pytest.approx(1 / 3)
    assert [name for name in found if is_evaluated(name)] == ["evaluation/reward_mean", "evaluation/math/reward_mean"]


def test_results_and_responses_are_files_and_a_table(tmp_path: Path) -> None:
    alone = Evaluated(set=EvaluationSet(prompts=PROMPTS[:1], sampling=SAMPLED), groups=[group(0, [1])])
    results = {each.set.name: result_of(each) for each in (alone, EVALUATED)}
    write_results(tmp_path, results, model="model", seconds={"start": 1.0})
    written = json.loads((tmp_path / RESULTS).read_text())
    assert written["sets"]["math"]["settings"]["temperature"] == 1.0
    assert written["sets"]["held_out"]["metrics"]["reward_error"] is None, "the error of one prompt is not known"
    head, first, second = table(results).splitlines()
    assert head.split()[:4] == ["set", "count", "samples", "match"] and "pass@2" in head and "lost attempts" in head
    assert first.split()[:4] == ["held_out", "1", "1", "1"]
    assert "0.3333 +- 0.17" in second
    write_responses(tmp_path, [EVALUATED])
    records = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert [(each["set"], each["id"], each["lost"]) for each in records] == [
        ("math", "p0", 0),
        ("math", "p1", 0),
        ("math", "p2", 2),
    ]
    assert records[0]["responses"][0] == {
        "text": "1",
        "tokens": 1,
        "finish_reason": "length",
        "reward": 1,
        "reward_parts": {"match": 1},
    }


def test_sets_are_sampled_by_their_own_settings_and_keep_their_order() -> None:
    asked: list[float] = []

    def answer(request: GenerationRequest) -> Completion:
        asked.append(request.sampling.temperature)
        return Completion(
            token_ids=request.input.token_ids, logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP
        )

    attempts = LocalAttempts([answering(answer)], lambda rollout: None)
    greedy = EvaluationSet(prompts=PROMPTS[::-1], sampling=SamplingParams(max_tokens=4, temperature=0.0))
    first, second = evaluate_streaming(attempts, None, [greedy, MATH])
    assert sorted(asked) == [0.0] * 3 + [1.0] * 12
    assert [own.prompt.id for own in first.groups] == ["p2", "p1", "p0"]
    assert [[each.sample_index for each in own.rollouts] for own in second.groups] == [[0, 1, 2, 3]] * 3


def test_a_majority_votes_among_the_first_attempts() -> None:
    # Solved are the answers 8, 2 and none: the second prompt's 2 has two votes of three, the third has no vote at all.
    groups = [group(0, [0, 1, 0, 1]), group(1, [0, 1, 1, 0]), group(2, [0, math.nan, 0])]
    said = {0: ["7", "8", "7", "8"], 1: ["1", "2", "2", None], 2: [None, "x", None]}
    asked: list[Rollout] = []

    def answers(rollouts: Sequence[Rollout]) -> list[str | None]:
        asked.extend(rollouts)
        return [said[PROMPTS.index(each.prompt)][each.sample_index] for each in rollouts]

    voting = replace(MATH, answers=answers)
    found = judged(voting, groups, None).metrics()
    assert len(asked) == 4 + 4 + 2, "an attempt that nothing scored is not asked"
    # First attempts: 7, 1, none. Of two: 7 and 1 were given first. Of four: 7 again, by two of four, and then 2.
    assert found["maj_at_1"] == 0 and found["maj_at_2"] == 0
    assert found["maj_at_4"] == pytest.approx((0 + 1) / 2) and found["maj_at_4_error"] == pytest.approx(0.5)
    assert "maj_at_1" not in judged(MATH, groups, None).metrics()
