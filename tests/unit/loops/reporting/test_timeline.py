"""The files of a run's phases and warnings."""

import json
import logging
from pathlib import Path

import pytest

from rlframe.loops.phases import Phases
from rlframe.loops.report.times import times
from rlframe.loops.reporting.timeline import Timeline
from rlframe.loops.reporting.warned import Warned
from rlframe.utils.warned import MOST


class Engines:
    """A role."""

    role = "rollout"


def lines(file: Path) -> list[dict]:
    """A JSONL file's records."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def test_phases_are_written_with_their_roles_and_cut_off_on_resume(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    phase = Phases(sharing=[], announce=lambda _: None, ended=timeline.ended)
    for step in (1, 2):
        with phase("rollout", on=Engines()):
            with phase("reward"):
                pass
        timeline.write(step)
    timeline.write(3)
    first, second = lines(tmp_path / "timeline.jsonl")
    assert (first["step"], second["step"]) == (1, 2)
    assert [(each["name"], each["role"]) for each in first["phases"]] == [("reward", "driver"), ("rollout", "rollout")]
    assert all(each["start_s"] <= each["end_s"] for each in first["phases"])
    timeline.rewind(1)
    assert [line["step"] for line in lines(tmp_path / "timeline.jsonl")] == [1]


def test_a_phase_says_until_when_roles_changed_for_it(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.ended("train", Engines(), 2.0, 0.5)
    timeline.ended("reward", None, 1.0, 0.0)
    timeline.write(1)
    (line,) = lines(tmp_path / "timeline.jsonl")
    train, reward = line["phases"]
    assert train["ready_s"] - train["start_s"] == pytest.approx(0.5, abs=0.0011)
    assert "ready_s" not in reward


def phase(name: str, role: str, start: float, end: float) -> dict:
    """A phase of the timeline."""
    return {"name": name, "role": role, "start_s": start, "end_s": end}


def test_time_of_roles_worked_by_hand() -> None:
    # Engines sample for 6 s, of which a judge takes 2 s and a part of the judge's phase 1 s; then 4 s of training.
    phases = [
        phase("part", "judge", 2, 3),
        phase("judge", "judge", 1, 3),
        phase("rollout", "rollout", 0, 6),
        phase("train", "policy", 6, 10),
    ]
    found = times([{"step": 1, "phases": phases}, {"step": 2}])
    assert found["seconds"] == 10
    assert found["roles"] == [
        {"role": "judge", "phases": {"part": 1, "judge": 1}, "idle_s": 8},
        {"role": "policy", "phases": {"train": 4}, "idle_s": 6},
        {"role": "rollout", "phases": {"rollout": 4}, "idle_s": 6},
    ]


def test_engines_that_sample_all_the_time_are_roles_and_the_loop_waits_for_them(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.ended("rollout", Engines(), 2.0)
    timeline.engines_sampled(8.0, [6.0, 2.0])
    timeline.write(1)
    timeline.ended("rollout", Engines(), 1.0)
    timeline.write(2)
    first, second = lines(tmp_path / "timeline.jsonl")
    assert first["engines"]["busy_s"] == [6.0, 2.0] and "engines" not in second
    found = times([first])
    assert [(each["role"], each["phases"], each["idle_s"]) for each in found["roles"]] == [
        ("driver", {"rollout": pytest.approx(2.0, abs=0.01)}, pytest.approx(0.0, abs=0.01)),
        ("engine 0", {"sampling": 6.0}, pytest.approx(2.0, abs=0.01)),
        ("engine 1", {"sampling": 2.0}, pytest.approx(6.0, abs=0.01)),
    ]


def test_steps_before_engines_say_how_busy_they_were_are_waits_too() -> None:
    engines = {"start_s": 2.0, "end_s": 4.0, "busy_s": [1.0]}
    first = {"step": 1, "phases": [phase("rollout", "rollout", 0, 2)]}
    second = {"step": 2, "phases": [phase("rollout", "rollout", 2, 4)], "engines": engines}
    found = times([first, second])
    assert [(each["role"], each["phases"]) for each in found["roles"]] == [
        ("driver", {"rollout": 4}),
        ("engine 0", {"sampling": 1}),
    ]


def test_of_a_long_run_the_first_and_the_last_steps_are_drawn() -> None:
    found = times({"step": step, "phases": [phase("train", "policy", step, step + 1)]} for step in range(1, 101))
    assert [line["step"] for line in found["steps"]] == [1, 2, 3, *range(61, 101)]
    assert found["roles"][0]["phases"] == {"train": 100}


def test_warnings_are_kept_for_the_report_and_without_secrets(tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    warned = Warned(tmp_path, step=lambda: 7, anew=True)
    logger = logging.getLogger("rlframe.somewhere")
    logger.info("not this")
    logger.warning("the key is %s", "correct-horse-battery")
    warned.note("rewards do not differ")
    warned.close()
    logger.warning("too late")
    found = lines(tmp_path / "warnings.jsonl")
    assert [(line["step"], line["of"], line["text"]) for line in found] == [
        (7, "rlframe.somewhere", "the key is ***"),
        (7, "rlframe", "rewards do not differ"),
    ]
    Warned(tmp_path, step=lambda: 8, anew=False).close()
    assert len(lines(tmp_path / "warnings.jsonl")) == 2
    Warned(tmp_path, step=lambda: 8, anew=True).close()
    assert not (tmp_path / "warnings.jsonl").exists()


def test_a_flood_of_warnings_and_a_folder_that_is_gone_do_no_harm(tmp_path: Path) -> None:
    warned = Warned(tmp_path, step=lambda: 1, anew=True)
    for number in range(MOST + 5):
        warned.note(str(number))
    warned.close()
    assert len(lines(tmp_path / "warnings.jsonl")) == MOST
    gone = Warned(tmp_path / "gone", step=lambda: 1, anew=True)
    gone.note("lost")
    gone.close()
