"""What a run writes down, and what it keeps of it on resume."""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from rlframe.loops.config import LoggingConfig
from rlframe.loops.phases import Phases
from rlframe.loops.reporting.metrics import MetricsLog, environment_metrics, rollout_metrics
from rlframe.loops.reporting.trackers.base import EVALUATED, Tracker
from rlframe.loops.reporting.trackers.tensorboard import TensorBoard
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import OFFLINE_VERSION, FinishReason, Group, Rollout
from rlframe.utils.files.jsonl import append


def rollout(index: int, *, reward: float, length: int = 3, finish: FinishReason = FinishReason.STOP) -> Rollout:
    """An attempt with a prompt of two tokens and a response of `length`."""
    return Rollout(
        prompt=Prompt(id=f"p{index}", text="2+2=", input=ModelInput((1, 2)), answer="4"),
        sample_index=0,
        input=ModelInput([1, 2, *range(length)]),
        loss_mask=[False, False] + [True] * length,
        rollout_logprobs=[0.0] * (2 + length),
        versions=[OFFLINE_VERSION, OFFLINE_VERSION] + [7] * length,
        finish_reason=finish,
        text=f"answer {index}",
        reward=reward,
        reward_parts={"match": reward, "brief": 0.5 * index},
    )


def pairs(rollouts: list[Rollout]) -> list[Group]:
    """Groups of two."""
    halves = [rollouts[first : first + 2] for first in range(0, len(rollouts), 2)]
    return [Group(id=str(index), prompt=pair[0].prompt, rollouts=pair) for index, pair in enumerate(halves)]


def test_rollout_metrics_worked_by_hand() -> None:
    # Groups of two: rewards (1, 0), (0, 0), (1, 1).
    rollouts = [
        rollout(0, reward=1.0, length=2),
        rollout(1, reward=0.0, length=4, finish=FinishReason.LENGTH),
        rollout(2, reward=0.0, length=6),
        rollout(3, reward=0.0, length=12, finish=FinishReason.LENGTH),
        rollout(4, reward=1.0, length=3),
        rollout(5, reward=1.0, length=3, finish=FinishReason.ABORT),
    ]
    rollouts[3].reward_failed = True
    assert rollout_metrics(pairs(rollouts)) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": 0.5,  # every reward is 1/2 away from the mean
            "reward/match_mean": 0.5,
            "reward/brief_mean": 0.5 * (0 + 1 + 2 + 3 + 4 + 5) / 6,
            "reward/failed_fraction": 1 / 6,
            "reward/unscored_fraction": 0,
            "reward/flat_groups_fraction": 2 / 3,
            "rollout/response_tokens_mean": 30 / 6,
            # Sorted 2 3 3 4 6 12: at least half are at most 3, and at least 0.9 or 0.99 at most 12.
            "rollout/response_tokens_p50": 3,
            "rollout/response_tokens_p90": 12,
            "rollout/response_tokens_p99": 12,
            "rollout/response_tokens_max": 12,
            "rollout/repeated_fraction": 0,  # each response counts up
            "rollout/truncated_fraction": 2 / 6,
            "rollout/sampled": 6,
            "rollout/tokens": 30 + 6 * 2,
        }
    )


def test_an_attempt_of_several_sequences_counts_once() -> None:
    # Rewards 0 + 1 at a token of the first attempt's last sequence, and 1.
    one, two, three = (rollout(index, reward=reward) for index, reward in enumerate([0.0, 0.0, 1.0]))
    two.sequence, two.numbers = 1, {"tries": 4.0}
    for each in (one, two, three):
        each.messages = [{"role": "user", "content": "2+2="}]
    two.credit(1.0)
    metrics = rollout_metrics([Group(id="0", prompt=one.prompt, rollouts=[one, two, three])])
    assert metrics["reward/mean"] == 1.0 and metrics["reward/flat_groups_fraction"] == 1.0
    assert metrics["reward/match_mean"] == 0.5 == metrics["reward/at_tokens_mean"]
    assert metrics["environment/turns_mean"] == 1.5 and metrics["environment/tries_mean"] == 4.0
    assert metrics["rollout/sampled"] == 3.0
    # Not the mean of both.
    two.numbers = {"turns": 9.0}
    assert environment_metrics([[one, two], [three]])["environment/turns_mean"] == 9.0


def test_what_no_reward_had_a_say_on_counts_in_no_mean() -> None:
    # Rewards (1, none), (0, 1); the part that judged the second rollout too counts 0.5 there.
    rollouts = [rollout(index, reward=reward) for index, reward in enumerate([1.0, math.nan, 0.0, 1.0])]
    rollouts[1].reward_parts = {"brief": 0.5}
    metrics = rollout_metrics(pairs(rollouts))
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/match_mean"] == pytest.approx(2 / 3)
    assert metrics["reward/brief_mean"] == pytest.approx((0 + 0.5 + 1 + 1.5) / 4)
    assert metrics["reward/unscored_fraction"] == 0.25
    assert metrics["reward/flat_groups_fraction"] == 0.5


def test_hostile_text_is_written_and_read_back(tmp_path: pathlib.Path) -> None:
    append(tmp_path / "samples.jsonl", {"step": 1, "text": "\ud800 \x1b[31m \u202e"})
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "text": "\ud800 \x1b[31m \u202e"}]
    assert b"\x1b" not in (tmp_path / "samples.jsonl").read_bytes()


def lines(file: pathlib.Path) -> list[dict]:
    """A JSONL file's records."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def log_of(
    folder: pathlib.Path, *, done_steps: int | None = None, trackers: Sequence[Tracker] = (), **logging: Any
) -> MetricsLog:
    """Returns the log of a run of 100 steps without progress bar."""
    settings = {"tensorboard": False, "progress": False, "samples_per_step": 2} | logging
    config = LoggingConfig(**settings)
    return MetricsLog(config, folder, name="it", steps=100, done_steps=done_steps, trackers=trackers)


def test_metrics_and_samples_are_written_and_nothing_else(tmp_path: pathlib.Path) -> None:
    log = log_of(tmp_path)
    log.announce("train")
    log.log_evaluation(0, {"evaluation/match_mean": 0.25})
    log.log_samples(log.choose_samples(1, [rollout(index, reward=index / 2) for index in range(3)]))
    log.log(1, {"reward/mean": 0.5, "train/loss": -0.1})
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples", "samples.jsonl"]
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "evaluation/match_mean": 0.25},
        {"step": 1, "reward/mean": 0.5, "train/loss": -0.1, "cluster/restarts": 0.0},
    ]
    first, second = lines(tmp_path / "samples.jsonl")
    assert first == {
        "step": 1,
        "id": "p0",
        "prompt": "2+2=",
        "response": "answer 0",
        "answer": "4",
        "reward": 0.0,
        "reward_parts": {"match": 0.0, "brief": 0.0},
        "finish_reason": "stop",
        "versions": [7],
    }
    assert (second["id"], second["reward"]) == ("p1", 0.5)


def test_the_reward_of_a_sample_is_that_of_its_attempt_with_what_its_turns_earned(tmp_path: pathlib.Path) -> None:
    log, forked = log_of(tmp_path, samples_per_step=3), [rollout(0, reward=0.25) for _ in range(2)]
    forked[1].sequence = 1
    for each in forked:
        each.credit(1.0)
    log.log_samples(log.choose_samples(1, [*forked, rollout(1, reward=0.5), rollout(2, reward=1.0)]))
    log.close()
    assert [line["reward"] for line in lines(tmp_path / "samples.jsonl")] == [2.25, 2.25, 0.5]


@pytest.mark.parametrize(("done_steps", "kept"), [(None, []), (1, [1]), (2, [1, 2])])
def test_a_new_run_starts_empty_and_a_resumed_one_with_what_it_keeps(
    tmp_path: pathlib.Path, done_steps: int | None, kept: list[int]
) -> None:
    log = log_of(tmp_path)
    for step in (1, 2):
        log.log(step, {"reward/mean": 0.0})
        log.log_samples(log.choose_samples(step, [rollout(step, reward=0.0)]))
    log.close()
    log_of(tmp_path, done_steps=done_steps).close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [line["step"] for line in lines(tmp_path / name)] == kept


def test_tensorboard_gets_every_metric(tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "tensorboard", None)
    log = log_of(tmp_path, trackers=[board])
    for step in (1, 2):
        log.log(step, {"reward/mean": step / 4, "train/loss": 1.0})
    log.close()
    board.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert len(events.Scalars("train/loss")) == 2


def test_a_run_begun_anew_replaces_what_a_killed_one_left_in_tensorboard(tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (0.25, 0.5):
        board = TensorBoard(tmp_path, None)
        for step in (0, 1):
            board(step, {"reward/mean": first})
        board.rewind(None)
        for step in (0, 1):
            board(step, {"reward/mean": first + 0.125})
        board.close(failed=False)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in events.Scalars("reward/mean")] == [(0, 0.625), (1, 0.625)]


def test_steps_that_come_again_replace_the_first(tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "tensorboard", None)
    log = log_of(tmp_path, trackers=[board])
    for step in (1, 2, 3):
        log.log(step, {"reward/mean": step / 4, **({"later/name": 1.0} if step == 3 else {})})
        log.log_samples(log.choose_samples(step, [rollout(step, reward=0.0)]))
    log.num_restarts += 1
    log.rewind(1)
    assert log.measured(3) == ({}, {"reward/mean", "cluster/restarts"})
    log.log(2, {"reward/mean": 0.75})
    log.rewind(1)
    log.log(2, {"reward/mean": 1.0})
    log.close()
    board.close(failed=False)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.25, "cluster/restarts": 0.0},
        {"step": 2, "reward/mean": 1.0, "cluster/restarts": 1.0},
    ]
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [1]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("reward/mean")] == [(1, 0.25), (2, 1.0)]


def test_the_bar_shows_the_phase_and_the_last_steps_numbers(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(tmp_path, progress=True)
    log.log(1, {"reward/mean": 0.5, "train/loss": -0.123456, "data/epoch": 3.0})
    log.announce("rollout")
    log.print_line("said")
    log.close()
    captured = capsys.readouterr()
    assert "said" in captured.out
    assert "phase=rollout" in captured.err and "reward=0.5" in captured.err and "loss=-0.1235" in captured.err
    assert "1/100" in captured.err


def test_phases_round_an_evaluation_beside_training_are_those_of_the_step_that_waits_for_it(
    tmp_path: pathlib.Path,
) -> None:
    made = log_of(tmp_path)
    phase = Phases(sharing=[], announce=made.announce, ended=made.timeline.ended)
    with phase("weight_sync"):
        with phase("evaluation"):
            pass
        made.log_evaluation(99, {EVALUATED: 99.0, "evaluation/reward_mean": 0.5})
    made.log(100, {})
    # No step follows the last one.
    with phase("evaluation"):
        pass
    made.log_evaluation(100, {EVALUATED: 100.0, "evaluation/reward_mean": 0.5})
    made.close()
    assert [
        (line["step"], [each["name"] for each in line["phases"]]) for line in lines(tmp_path / "timeline.jsonl")
    ] == [
        (100, ["evaluation", "weight_sync"]),
        (100, ["evaluation"]),
    ]
