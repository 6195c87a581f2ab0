"""The door: exit codes, and what a person reads when a configuration is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlframe import __version__
from rlframe.launch import main, tool_of
from rlframe.run.config import RunConfig
from rlframe.run.folder import claim
from rlframe.run.load import load, to_run
from rlframe.utils.errors import UsageError
from tests.multiprocess.door import rlframe

pytestmark = pytest.mark.later


def test_faults_are_listed_without_a_traceback_and_leave_nothing_behind(tmp_path: Path) -> None:
    done = rlframe(tmp_path, "train.optimzer.lr=1e-3", "algorithm.group_size=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "the configuration has 2 faults:\n"
        "  - algorithm.group_size must be at least 2 for grpo, got 1: in a group of one every advantage is 0\n"
        "  - train.optimzer.lr is not a key; did you mean train.optimizer.lr?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_faults_across_components_are_found_before_ray_starts(tmp_path: Path) -> None:
    done = rlframe(
        tmp_path, "model.path=./nothing", "prompts_per_step=3", "train.num_minibatches=2", "data.path=nothing.jsonl"
    )
    assert done.returncode == 2
    assert "3 faults" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_shows_the_composition(tmp_path: Path) -> None:
    done = rlframe(tmp_path, "--config-name", "sft_qwen3_moe_tiny", "--cfg", "job", "steps=7")
    assert done.returncode == 0
    assert "steps: 7\n" in done.stdout and "algorithm:\n  name: sft\n" in done.stdout


def test_a_sweep_with_a_wrong_run_is_refused_before_the_first_begins(tmp_path: Path) -> None:
    sweep = ["-m", "--config-name", "sft_qwen3_moe_tiny", "train.lr=1e-6,-1", "steps=2"]
    done = rlframe(tmp_path, *sweep, "output=runs")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith(
        "1 of 2 runs is refused, so that none of them begins\n"
        "run 1: train.optimizer.lr=-1\n"
        "the configuration has 1 fault:\n"
        "  - train.optimizer.lr must be above 0, got -1.0\n"
        "all with steps=2 output=runs\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_sweep_whose_folders_hold_other_runs_is_refused_before_the_first_begins(tmp_path: Path) -> None:
    claim(load("sft_qwen3_moe_tiny", [f"output={tmp_path}/runs/1", "seed=2"])).close()
    done = rlframe(tmp_path, "-m", "--config-name", "sft_qwen3_moe_tiny", "seed=1,3", "output=runs")
    assert done.returncode == 2
    assert "1 of 2 runs is refused" in done.stderr and "runs/1/config.yaml has seed=2, this run has 3" in done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1"]


def test_a_file_in_ones_own_folder_takes_the_place_of_the_package_s(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/multiplication.yaml").write_text("path: other.jsonl\n")
    words = ["--config-dir", ".", "--config-name", "grpo_qwen3_moe", "data=multiplication", "--cfg", "job"]
    assert "path: other.jsonl" in rlframe(tmp_path, *words).stdout
    (tmp_path / "grpo_qwen3_moe.yaml").write_text("defaults: [grpo_qwen3_moe, _self_]\n")
    done = rlframe(tmp_path, *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr
    assert "defaults must not lead back to the file that has them" in done.stderr


def test_the_first_word_names_a_tool(tmp_path: Path) -> None:
    done = rlframe(tmp_path, "inspect-data", "--config-name", "grpo_qwen3_moe", "--config-dir=nowhere")
    assert done.returncode == 1 and "--config-dir must be a folder" in done.stderr


def test_the_version_is_that_of_rlframe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["rlframe", "--version"])
    main()
    assert capsys.readouterr().out == f"rlframe {__version__}\n"


def test_a_word_that_is_no_tool_is_refused_with_the_nearest() -> None:
    assert tool_of(["plan-sync"]) == "plan_sync"
    assert tool_of(["steps=1"]) is tool_of(["--help"]) is tool_of(["~reward"]) is tool_of([]) is None
    with pytest.raises(UsageError) as caught:
        tool_of(["docter"])
    assert str(caught.value).startswith("docter is not a tool: there are audit, convert, doctor, ")
    assert str(caught.value).endswith("a run is `rlframe --config-name NAME key=value`; did you mean doctor?")


def test_a_sweep_goes_on_after_a_run_that_ends_with_an_internal_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(run: RunConfig, *_: Any, begin: Callable[[], None], **__: Any) -> dict[str, float]:
        begin()
        return {"last_loss": 1 / (run.seed - 1)}

    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlframe.run.check.checked", to_run)
    monkeypatch.setattr("rlframe.run.compose.run.run", loop)
    secret = "cluster.runtime_env.env_vars.MY_PASSWORD=swordfish"
    sweep = ["program", "-m", "--config-name", "sft_qwen3_moe_tiny", "seed=1,2", secret, "output=runs"]
    monkeypatch.setattr("sys.argv", sweep)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert said.err.count("ZeroDivisionError: division by zero\n") == 1
    assert [line.split() for line in said.out.splitlines()[:3]] == [
        ["overrides", "loss", "seconds", "output"],
        ["seed=1", "-", said.out.split()[6], "runs/0", "(failed)"],
        ["seed=2", "1", said.out.split()[11], "runs/1"],
    ]
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.parent.name for file in written} == {"0", "1"}
    assert "run 1 of the sweep: seed=2 cluster." in caplog.text
    assert "swordfish" not in said.out + said.err + caplog.text and not any(
        b"swordfish" in file.read_bytes() for file in written
    )


def test_a_run_whose_check_ends_with_an_internal_error_is_told_with_its_traceback_and_the_sweep_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(values: Any) -> RunConfig:
        run = to_run(values)
        return run if run.seed != 1 else 1 // 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlframe.run.check.checked", check)
    monkeypatch.setattr("rlframe.run.compose.run.run", lambda *_, begin, **__: begin() or {"last_loss": 1.0})
    monkeypatch.setattr("sys.argv", ["program", "-m", "--config-name", "sft_qwen3_moe_tiny", "seed=1,2", "output=runs"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert said.err.count("ZeroDivisionError") == 1 and said.out.splitlines()[2].split()[:2] == ["seed=2", "1"]


@pytest.mark.parametrize("words", [("-m", "hydra.sweep.dir=file/x", "seed=1,2"), ("hydra.run.dir=file/x",)])
def test_a_folder_that_hydra_cannot_make_is_told_without_a_traceback(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["program", "--config-name", "sft_qwen3_moe_tiny", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "file/x cannot be written: Not a directory; it is hydra.sweep.dir of a sweep, or" in capsys.readouterr().err
