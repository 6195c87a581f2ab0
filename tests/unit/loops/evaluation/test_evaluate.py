"""Evaluations beside training: when they are finished, by whose weights, and what a checkpoint holds of them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.attempts.sessions.calls import SessionFailed, Trouble
from rlframe.loops.evaluation.evaluate import (
    EvaluationBeside,
    WeightsGone,
    come_back,
    evaluate,
    evaluation_metrics,
    metrics_of,
)
from rlframe.loops.evaluation.sets import EvaluationSet
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams, members
from rlframe.utils.errors import WeightSyncFailed
from tests.local_attempts import LocalAttempts, answering

HELD_OUT = [Prompt(id=f"held{index}", text="", input=ModelInput((index,))) for index in range(5)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def evaluation(*, version: int = 3, observe: Callable[[Rollout], Any] = lambda rollout: None) -> EvaluationBeside:
    """An evaluation on an engine that repeats the prompt."""

    def answer(request: GenerationRequest) -> Completion:
        return Completion(
            token_ids=request.input.token_ids,
            logprobs=[-1.0],
            versions=[attempts.rollout.version],
            finish_reason=FinishReason.STOP,
        )

    attempts = LocalAttempts([answering(answer)], lambda rollout: None, version=version, observe=observe)
    return EvaluationBeside(attempts=attempts, sets=[EvaluationSet(prompts=HELD_OUT, sampling=GREEDY)])


def finished(made: EvaluationBeside) -> list[Rollout]:
    """The responses of an evaluation, set by set."""
    return [rollout for groups in made.finish() or [] for rollout in members(groups)]


def test_groups_of_training_end_while_an_evaluation_is_under_way() -> None:
    made = evaluation()
    made.begin(3)
    training = Group.begin("7", Prompt(id="p", text="", input=ModelInput((9,))), 2)
    made.attempts.start([made.attempts.task(training, step=4)])
    with made.attempts.waiting():
        assert [ended.group.id for ended in made.attempts.next()] == ["7"]
    assert made.step == 3
    rollouts = finished(made)
    assert [rollout.prompt.id for rollout in rollouts] == [prompt.id for prompt in HELD_OUT]
    assert [rollout.token_ids.tolist() for rollout in rollouts] == [[index, index] for index in range(5)]
    assert made.step is None


def test_what_happens_to_attempts_of_an_evaluation_is_not_counted_among_those_of_training() -> None:
    def observe(rollout: Rollout) -> None:
        raise SessionFailed(Trouble.RAISED, "no session left")

    made = evaluation(observe=observe)
    evaluate(made.attempts, None, made.sets)
    assert made.attempts.events == {}
    made.begin(3)
    training = Group.begin("7", Prompt(id="p", text="", input=ModelInput((9,))), 2)
    made.attempts.start([made.attempts.task(training, step=4)])
    made.finish()
    assert made.attempts.events == {"raised": 2}


@pytest.mark.parametrize(("failing", "lost"), [({1, 3}, {"evaluation/lost_attempts": 2.0}), (set[int](), {})])
def test_attempts_at_held_out_prompts_that_are_in_no_mean_are_counted(
    failing: set[int], lost: dict[str, float]
) -> None:
    def observe(rollout: Rollout) -> None:
        if rollout.token_ids[0] in failing:
            raise SessionFailed(Trouble.RAISED, "no session left")

    made = evaluation(observe=observe)
    means = {"evaluation/reward_mean": 0.0, "evaluation/response_tokens_mean": 1.0}
    assert metrics_of(evaluate(made.attempts, None, made.sets)) == means | lost


def test_groups_of_training_that_end_during_the_last_wait_are_kept() -> None:
    made = evaluation()
    training = Group.begin("7", Prompt(id="p", text="", input=ModelInput((9,))), 1)
    made.begin(3)
    made.attempts.start([made.attempts.task(training, step=4)])
    made.finish()
    with made.attempts.waiting():
        assert [ended.group.id for ended in made.attempts.next()] == ["7"]


def test_an_evaluation_by_other_weights_ends_the_run() -> None:
    made = evaluation(version=4)
    made.begin(3)
    with pytest.raises(WeightSyncFailed, match="weights of version 4 sampled a response of the evaluation of step 3"):
        made.finish()


@pytest.mark.parametrize("done", [False, True])
def test_a_resumed_run_begins_an_evaluation_again_unless_it_was_written(done: bool, tmp_path: Path) -> None:
    made, resumed = evaluation(), evaluation()
    made.hold(tmp_path)
    resumed.go_on(tmp_path, is_done=lambda step: False)
    assert resumed.step is None
    made.begin(3)
    made.hold(tmp_path)
    resumed.go_on(tmp_path, is_done=lambda step: done and step == 3)
    assert resumed.step == (None if done else 3)
    made.forget()
    resumed.forget()


def test_several_sets_are_evaluated_at_once_and_end_together() -> None:
    made = evaluation()
    sampled = EvaluationSet(
        name="sampled", prompts=HELD_OUT[:2], sampling=SamplingParams(max_tokens=4), samples_per_prompt=3
    )
    made.sets = [*made.sets, sampled]
    made.begin(3)
    held_out, several = made.finish() or []
    assert [group.prompt.id for group in held_out] == [prompt.id for prompt in HELD_OUT]
    assert [(group.prompt.id, len(group.rollouts)) for group in several] == [("held0", 3), ("held1", 3)]


def test_without_held_out_prompts_nothing_is_begun() -> None:
    made = evaluation()
    made.sets = []
    made.begin(3)
    assert made.step is None


def test_what_is_forgotten_does_not_end() -> None:
    made = evaluation()
    made.begin(3)
    made.forget()
    assert made.step is None and sum(made.attempts.state().attempts.values()) == 0
    made.begin(3)
    assert len(finished(made)) == 5


@pytest.mark.parametrize("known_by", ["source", "dataset"])
def test_metrics_of_several_datasets_are_told_apart(known_by: str) -> None:
    def scored(name: str, right: float) -> Rollout:
        names = {"source": "a.jsonl"} | {known_by: name}
        return Rollout(
            prompt=Prompt(id=name, text="", input=ModelInput((0,)), **names),
            sample_index=0,
            input=ModelInput((0, 1)),
            loss_mask=[False, True],
            rollout_logprobs=[0.0, -1.0],
            versions=[-1, 0],
            finish_reason=FinishReason.STOP,
            reward=right,
            reward_parts={"match": right},
        )

    sums = [scored("sums", 1.0), scored("sums", 0.0), scored("sums", 0.0), scored("sums", 0.0)]
    both = evaluation_metrics([*sums, scored("words", 1.0)])
    assert {name: value for name, value in both.items() if name.startswith("evaluation/match")} == {
        "evaluation/match_mean": 0.4,
        "evaluation/match_mean/sums": 0.25,
        "evaluation/match_mean/words": 1.0,
    }
    assert "evaluation/match_mean/sums" not in evaluation_metrics(sums)


class Sync:
    """The weight sync of engines that only evaluate."""

    def __init__(self, made: EvaluationBeside, version: int):
        self._made, self.policy_version = made, version
        self.published: list[int] = []

    def publish(self, version: int) -> None:
        self.published.append(version)
        self.policy_version = self._made.attempts.rollout.version = version


def apart(*, version: int = 0) -> tuple[EvaluationBeside, Sync]:
    """An evaluation on an engine of its own."""
    made = evaluation(version=version)
    sync = Sync(made, version)
    made.weight_sync = sync  # type: ignore[assignment]
    return made, sync


def test_engines_of_their_own_get_the_weights_of_the_step_when_its_evaluation_begins() -> None:
    made, sync = apart()
    made.begin(0)
    assert made.finish() and sync.published == []
    made.begin(3)
    rollouts = finished(made)
    assert rollouts and sync.published == [3]
    assert {version for rollout in rollouts for version in rollout.versions[rollout.loss_mask].tolist()} == {3}


def test_a_sync_waits_only_for_an_evaluation_that_shares_its_engines() -> None:
    shared, (made, _) = evaluation(), apart()
    assert not shared.must_end and not made.must_end
    shared.begin(3)
    assert shared.must_end
    made.begin(3)
    while not made.must_end:
        assert made.step == 3
    # It is done, so that nothing is waited for.
    assert set(made._names()) <= made.attempts._aside.keys()
    assert len(finished(made)) == 5 and not made.must_end
    shared.forget()


@pytest.mark.parametrize("waits", [False, True])
def test_an_evaluation_whose_weights_are_gone_is_left_out(waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    made, _ = apart()
    made.begin(3)

    def lost(*, wait_s: float) -> Any:
        come_back(SimpleNamespace(rejoin=lambda engines: False, policy_version=3), [0])  # type: ignore[arg-type]

    made.attempts.look = lost
    cancel = made.attempts.cancel
    assert made.finish() is None if waits else not made.must_end
    assert made.step is None
    assert "the evaluation of step 3 is left out: engine 0 of the evaluation died" in caplog.text
    assert "version 3; weight_sync.hold=host keeps them" in caplog.text
    cancel()


def test_an_engine_that_comes_back_with_its_weights_goes_on() -> None:
    asked: list[list[int]] = []
    come_back(SimpleNamespace(rejoin=lambda engines: asked.append(engines) or True), [1])  # type: ignore[arg-type]
    assert asked == [[1]]
    with pytest.raises(WeightsGone, match="no longer has the weights of version 3"):
        come_back(SimpleNamespace(rejoin=lambda engines: False, policy_version=3), [1])  # type: ignore[arg-type]
