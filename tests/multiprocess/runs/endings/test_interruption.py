"""A run that is asked to end saves first, and goes on bit for bit as if it had not been; nobody else writes to it."""

import os
import signal
from pathlib import Path

import pytest

from tests.multiprocess.program import ONLINE, Program, assert_equal_models, metrics, run
from tests.multiprocess.runs.endings.test_resume import OFFLINE, complete


def last_line(program: Program) -> str:
    """The last of what a program said; it must have ended without a traceback, Python's or Ray's."""
    errors = program.errors()
    assert "Traceback" not in errors and "SIGTERM received" not in errors, errors
    return errors.splitlines()[-1]


# `make test` has the other signal below, the lock in test_lock.py, going on bit for bit in test_resume.py.
@pytest.mark.thorough
def test_sigterm_saves_and_a_second_start_is_refused_meanwhile(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Program(folder, ONLINE, fresh=True) as program:
        program.wait_for_step(2)
        # It would be done before the second has begun.
        os.kill(program.process.pid, signal.SIGSTOP)
        with Program(tmp_path / "beside" / "run", ONLINE | {"output": folder}, fresh=True) as second:
            assert second.finish() == 2
            assert f"output: {folder} is in use by pid {program.process.pid} on " in second.errors()
        os.kill(program.process.pid, signal.SIGTERM)
        os.kill(program.process.pid, signal.SIGCONT)
        assert program.finish() == 143, program.errors()
        said = last_line(program)
        assert program.survivors() == []
    saved = complete(folder)[-1]
    assert said == f"stopped by SIGTERM: saved after step {int(saved[5:])} of 6; the same command resumes from there"
    assert len([line for line in metrics(folder) if "train/loss" in line]) == int(saved[5:])
    run(folder, ONLINE)
    assert metrics(folder) == metrics(whole)
    assert_equal_models(folder, whole)
    assert not list(folder.glob("LOCK-*"))


@pytest.mark.thorough
def test_ctrl_c_in_a_terminal_saves_what_is_written_in_the_background_too(tmp_path: Path) -> None:
    settings = OFFLINE | {"checkpoint.asynchronous": "true", "steps": 500, "checkpoint.keep_best": 0}
    settings = {key: value for key, value in settings.items() if not key.startswith("checkpoint.best")}
    with Program(tmp_path / "run", settings, config="sft_qwen3_moe_tiny", fresh=True) as program:
        program.wait_for_step(3)
        # A terminal sends it to every process of the group: Ray's, the actors', the reward workers'.
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.finish() == 130, program.errors()
        said = last_line(program)
        assert program.survivors() == []
    saved = complete(tmp_path / "run")[-1]
    assert said == f"stopped by Ctrl-C: saved after step {int(saved[5:])} of 500; the same command resumes from there"
    again = settings | {"steps": int(saved[5:]) + 1, "train.optimizer.decay_steps": 500}
    steps = [line["step"] for line in metrics(run(tmp_path / "run", again, config="sft_qwen3_moe_tiny"))]
    assert [step for step in steps if step] == [*range(1, int(saved[5:]) + 2), int(saved[5:]) + 1]
