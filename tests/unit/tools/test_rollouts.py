"""Paging through kept rollouts, and writing reports, from the command line."""

from pathlib import Path

import pytest

from rlframe.tools import report, rollouts
from tests.unit.loops.report.runs import HOSTILE, record, run_folder, write_samples


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run of two steps with attempts of several rewards."""
    folder = run_folder(tmp_path / "run", steps=2)
    rewards = {1: (0.25, 1.0), 2: (0.5, None)}
    write_samples(folder, *(record(step, each, text=f"r{each}") for step, own in rewards.items() for each in own))
    return folder


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], ["r0.25", "r1.0", "r0.5", "rNone"]),
        (["--step", "1"], ["r0.25", "r1.0"]),
        (["--best", "2"], ["r1.0", "r0.5"]),
        (["--worst", "1"], ["r0.25"]),
        (["--search", "R1.0"], ["r1.0"]),
        (["--step", "2", "--best", "9"], ["r0.5", "rNone"]),
    ],
)
def test_filters(
    output: Path, options: list[str], found: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert rollouts.main([str(output), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1].removeprefix("a") for line in lines if line.lstrip().startswith("policy")] == found


def test_a_rollout_is_shown_with_its_numbers(output: Path, capsys: pytest.CaptureFixture) -> None:
    rollouts.main([str(output), "--best", "1", "--tokens"])
    text = capsys.readouterr().out
    assert "step 1, prompt p0, attempt 1: reward 1" in text and "right answer: 4" in text
    assert "rewards of the group: 0 1; advantage here: 1" in text
    last = next(line for line in text.splitlines() if line.split()[:1] == ["2"]).split()
    assert last == ["2", "2", "r1.0", "1", "-0.5", "-0.25", "0.25", "1", "0"]


def test_sequences_of_one_attempt_count_as_one(output: Path, capsys: pytest.CaptureFixture) -> None:
    group = {"group_rewards": [2.0, 2.0, 1.5], "group_advantages": [0.5, 0.5, -0.5], "group_attempts": 2}
    attempts = [(0, 0, 2.0), (0, 1, 2.0), (1, 0, 1.5)]
    records = [
        record(3, reward) | group | {"sample_index": index, "sequence": sequence, "group_place": place}
        for place, (index, sequence, reward) in enumerate(attempts)
    ]
    write_samples(output, *records)
    assert rollouts.main([str(output), "--best", "2"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("step")] == [
        "step 3, prompt p0, attempt 0: reward 2",
        "step 3, prompt p0, attempt 0, sequence 1: reward 2",
        "step 3, prompt p0, attempt 1: reward 1.5",
    ]
    assert text.count("rewards of the group, 2 attempts in 3 sequences: 2 2 1.5; advantage here: 0.5") == 2


def test_a_rollout_without_rewards_by_name_tells_how_it_ended(output: Path, capsys: pytest.CaptureFixture) -> None:
    write_samples(output, record(1, 0.5) | {"reward_parts": {}})
    rollouts.main([str(output)])
    assert "\n  ended: stop; right answer: 4\n" in capsys.readouterr().out


def test_texts_of_models_control_no_terminal(output: Path, capsys: pytest.CaptureFixture) -> None:
    write_samples(output, record(3, text=HOSTILE))
    assert rollouts.main([str(output), "--step", "3", "--tokens"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\u202e" not in text and r"\u001b[2J" in text


def test_it_says_what_is_missing(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert rollouts.main([str(output), "--search", "nowhere"]) == 1
    assert rollouts.main([str(tmp_path)]) == 2
    assert "logging.samples.keep" in capsys.readouterr().err
    assert rollouts.main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'nowhere'} is not a folder\n"
    with pytest.raises(SystemExit):
        rollouts.main([str(output), "--best", "0"])
    assert "must be a whole number from 1 on, got 0" in capsys.readouterr().err


def test_a_page_waits_after_each_screen_and_ends_on_q(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["", "q"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    rollouts.page((str(number) for number in range(10)), height=3)
    assert capsys.readouterr().out.split() == ["0", "1", "2", "3", "4", "5"]


def test_a_report_of_a_folder_without_a_run_ends_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_ends_with_another_status(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    (tmp_path / "file").touch()
    assert report.main([str(tmp_path), "--to", str(tmp_path / "file" / "page.html")]) == 1
    assert "cannot be written: Not a directory" in capsys.readouterr().err
