"""What a run on one machine leaves open: nothing that another machine could reach while it runs, nothing afterwards."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.multiprocess.program import LEARNING, Program, on_loopback, titled


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A run on the way, with two policy ranks, an engine and reward workers."""
    with Program(
        tmp_path_factory.mktemp("doors") / "run", LEARNING | {"steps": 100000, "rollout.num_engines": 1}, fresh=True
    ) as program:
        program.wait_for_step(1)
        yield program


def test_a_run_on_one_machine_listens_on_loopback_only(program: Program) -> None:
    doors = program.doors()
    assert any("gcs_server" in title for title, _ in doors) and any("ray::Megatron" in title for title, _ in doors)
    assert {door: address for door, address in doors.items() if not on_loopback(address)} == {}


def test_ray_asks_for_a_token_of_this_run_that_is_written_nowhere(program: Program) -> None:
    raylet = next(process for process in program.started() if "raylet/raylet" in " ".join(process.cmdline()))
    environment = raylet.environ()
    token = environment["RAY_AUTH_TOKEN"]
    assert environment["RAY_AUTH_MODE"] == "token" and len(token) == 64
    assert "RAY_AUTH_TOKEN" not in psutil.Process(program.process.pid).environ(), "it was made by the run"
    written = [path for path in program.folder.rglob("*") if path.is_file()]
    assert written and not any(token.encode() in path.read_bytes() for path in written)
    assert not any(token in " ".join(process.cmdline()) for process in program.started())


def test_workers_are_forked_from_one_process_that_has_imported_for_them(program: Program) -> None:
    (template,) = (each.pid for each in program.started() if "-m rlframe.cluster.template" in " ".join(each.cmdline()))
    for title in ("ray::MegatronWorker", "ray::RolloutWorker", "ray::RunnerWorker"):
        assert {each.ppid() for each in program.started() if titled(each, title)} == {template}, title


def test_who_asks_a_run_by_a_signal_gets_a_report_and_an_audit(program: Program) -> None:
    """Ray has not taken the signal for itself."""
    os.kill(program.process.pid, signal.SIGUSR1)
    program.wait_for(
        lambda: program.errors().count("report requested by SIGUSR1: ") + program.errors().count("audited: ") == 3
    )
    said = program.errors()
    assert "audited: all ranks of the trainer hold the right weights after step" in said
    assert "audited: trainer and engines hold version" in said


def test_nothing_is_left_soon_after_the_program_was_killed(program: Program) -> None:
    """Comes last: it ends the program of this module."""
    program.wait_for_step(2)
    assert any(titled(child, "ray::RolloutWorker") for child in program.children)
    os.kill(program.process.pid, signal.SIGKILL)
    assert program.survivors() == []


@pytest.mark.thorough
def test_nothing_is_left_soon_after_it_was_killed_while_it_started(tmp_path: Path) -> None:
    with Program(tmp_path / "run", LEARNING, fresh=True) as program:
        program.wait_for(lambda: any("raylet/raylet" in " ".join(each.cmdline()) for each in living(program)))
        time.sleep(1.5)
        program.children = program.started()
        os.kill(program.process.pid, signal.SIGKILL)
        assert program.survivors() == []


def living(program: Program) -> Iterator[psutil.Process]:
    """Those processes of the run that do not end while they are looked at."""
    for process in program.started():
        try:
            process.cmdline()
            yield process
        except psutil.Error:
            continue
