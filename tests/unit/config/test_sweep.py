"""The runs of a sweep: all of a batch are checked before the first begins, and a table ends it."""

import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlframe.config.load import configs_folder
from rlframe.config.sweep import Job, checked_first, table
from rlframe.utils.errors import ConfigError, SweepError
from rlframe.utils.faults import Fault


def job(overrides: str, results: dict[str, float], *, code: int = 0, output: str = "") -> Job:
    """A job that took two seconds."""
    made = Job(overrides=overrides.split(), started=0.0, output=output)
    made.end(results, code=code)
    made.seconds = 2.0
    return made


def test_a_sweep_ends_in_a_table_of_what_each_job_came_to() -> None:
    online = {"before/match_mean": 0.25, "after/match_mean": 0.75, "held_out_prompts": 8.0}
    offline = {"first_loss": 3.0, "last_loss": 0.5, "before/loss": 3.0, "after/loss": 1.0, "after/accuracy": 0.875}
    jobs = [
        job("algorithm=grpo", online, output="outputs/a/0"),
        job("algorithm=sft", {"first_loss": 3.0, "last_loss": 0.123456}, output="outputs/a/1"),
        job("algorithm=dpo", offline, output="outputs/a/3"),
        job("algorithm=rloo", {}, output="outputs/a/2", code=1),
        job("algorithm.group_size=1", {}, code=2),
    ]
    assert table(jobs).splitlines() == [
        "overrides               match  loss    accuracy  seconds  output",
        "algorithm=grpo          0.75   -       -         2.0      outputs/a/0",
        "algorithm=sft           -      0.1235  -         2.0      outputs/a/1",
        "algorithm=dpo           -      1       0.875     2.0      outputs/a/3",
        "algorithm=rloo          -      -       -         2.0      outputs/a/2 (failed)",
        "algorithm.group_size=1  -      -       -         2.0      refused",
    ]


def test_what_all_jobs_have_is_said_once() -> None:
    jobs = [
        job(f"algorithm={name} steps=2 train.optimizer.lr={lr} seed=1", {"last_loss": 0.5}, output=f"o/{index}")
        for index, (name, lr) in enumerate((name, lr) for name in ("grpo", "rloo") for lr in ("1e-6", "3e-6"))
    ]
    assert table(jobs).splitlines() == [
        "overrides                               loss  seconds  output",
        "algorithm=grpo train.optimizer.lr=1e-6  0.5   2.0      o/0",
        "algorithm=grpo train.optimizer.lr=3e-6  0.5   2.0      o/1",
        "algorithm=rloo train.optimizer.lr=1e-6  0.5   2.0      o/2",
        "algorithm=rloo train.optimizer.lr=3e-6  0.5   2.0      o/3",
        "all with steps=2 seed=1",
    ]
    # Of one job everything is its own.
    assert table(jobs[:1]).splitlines()[1].startswith("algorithm=grpo steps=2 ")


SIGNALLED = 9
"""An `x` of a run that a signal ends."""


def swept(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, wrong: dict[int, list[Fault]]) -> list[int]:
    """The runs that a sweep has begun, by number. Those whose `x` is in `wrong` have faults; it is the number, unless
    the arguments set it."""
    seen: list[int] = []
    begun: list[int] = []

    def fault(composed: DictConfig) -> ConfigError | None:
        seen.append(HydraConfig.get().job.num)
        return ConfigError(wrong[composed.x]) if composed.x in wrong else None

    (folder / "base.yaml").write_text((configs_folder() / "base.yaml").read_text() + "x: ${hydra:job.num}\n")

    @hydra.main(version_base="1.3", config_path=str(folder), config_name="base")
    def program(composed: DictConfig) -> Job:
        number = HydraConfig.get().job.num
        assert number in seen, "checked before"
        if composed.x == SIGNALLED:
            sys.exit(143)
        begun.append(number)
        return job(f"x={composed.x}", {"last_loss": 0.5}, output=f"o/{number}")

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["program", "-m", f"hydra.sweep.dir={folder}", *arguments])
    try:
        with checked_first(fault):
            program()
    except SweepError as error:
        sys.stderr.write(f"{error}\n")
    return begun


LR = Fault("x", "must be at most 2", got=3, hint="take 2")
OTHER = Fault("y", "has no effect")


def test_no_run_begins_while_another_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {3: [LR], 4: [LR, OTHER], 5: [LR]}
    assert swept(monkeypatch, tmp_path, "++x=1,2,3,4,5", "+y=0", wrong=wrong) == []
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "3 of 5 runs are refused, so that none of them begins\n"
        "run 2: x=3\n"
        "run 4: x=5\n"
        "the configuration has 1 fault:\n"
        "  - x must be at most 2, got 3; take 2\n"
        "run 3: x=4\n"
        "the configuration has 2 faults:\n"
        "  - x must be at most 2, got 3; take 2\n"
        "  - y has no effect\n"
        "all with y=0\n"
    )


def test_runs_that_are_right_begin_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert swept(monkeypatch, tmp_path, "x=1,2,3", wrong={}) == [0, 1, 2]
    # One combination is a sweep too.
    assert swept(monkeypatch, tmp_path, "x=1", wrong={}) == [0]


def test_of_a_sweeper_that_goes_on_with_results_each_batch_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["x=1,2,3,4,5,6", "hydra.sweeper.max_batch_size=2"]
    assert swept(monkeypatch, tmp_path, *arguments, wrong={4: [LR]}) == [0, 1]
    said = capsys.readouterr()
    assert said.err.startswith("1 of 2 runs is refused, so that none of them begins\nrun 3: x=4\n")
    # What has ended is not lost.
    assert [line.split()[0] for line in said.out.splitlines()] == ["overrides", "x=1", "x=2"]


def test_what_has_ended_before_a_signal_is_in_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["x=1,2,9,4"], ["x=1,2,9,4", "hydra.sweeper.max_batch_size=1"], ["x=9,1"]):
        with pytest.raises(SystemExit) as ended:
            swept(monkeypatch, tmp_path, *arguments, wrong={})
        assert ended.value.code == 143
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["overrides", "x=1", "x=2"] * 2


def test_the_check_sees_what_the_run_will_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Interpolations of Hydra's have their values of each run.
    assert swept(monkeypatch, tmp_path, "+z=a,b,c", wrong={2: [LR]}) == []
    assert swept(monkeypatch, tmp_path, "+z=a,b", wrong={2: [LR]}) == [0, 1]
