"""A run whose trainer rank is killed ends, in the same program, with the numbers of the run that nobody disturbed."""

import re
import signal
from pathlib import Path

import pytest

from tests.multiprocess.program import ONLINE, Program, assert_equal_models, lines, metrics, titled


def kill_rank(program: Program) -> int:
    """Kills a policy rank of a run, and returns its process."""
    victim = next(each for each in program.started() if titled(each, "ray::MegatronWorker"))
    victim.send_signal(signal.SIGKILL)
    return victim.pid


def test_a_run_outlives_its_trainer_ranks(whole: Path, tmp_path: Path) -> None:
    """One is killed before the first checkpoint, one while the second is written."""
    with Program(tmp_path / "run", ONLINE, held=["step 1", "checkpoint 4", "step 6"]) as program:
        program.wait_for_step(1)
        engines = [each for each in program.started() if titled(each, "ray::RolloutWorker")]
        victim = kill_rank(program)
        program.go_on("step 1")
        program.wait_for_half_a_checkpoint(4)
        kill_rank(program)
        program.go_on("checkpoint 4")
        program.wait_for_step(6)
        assert all(each.is_running() for each in engines), "engines are kept"
        program.go_on("step 6")
        assert program.finish() == 0, program.errors()
        said = program.errors()
    named = re.search(rf"^.*policy rank \d \(pid {victim} on \S+\) died in \w+", said, re.MULTILINE)
    assert named and "last lines of" in said, said
    assert "ranks from the start (there is no complete checkpoint); cluster.max_restarts=3 leaves 2 more" in said
    assert "checkpoints/step-00000002; cluster.max_restarts=3 leaves 1 more" in said
    assert "Traceback" not in said, said
    assert metrics(program.folder) == metrics(whole)
    assert lines(program.folder / "samples.jsonl") == lines(whole / "samples.jsonl")
    assert_equal_models(program.folder, whole)
    counted = [line["cluster/restarts"] for line in lines(program.folder / "metrics.jsonl") if "train/loss" in line]
    assert counted == [1, 1, 2, 2, 2, 2]


@pytest.mark.thorough
def test_a_rank_that_dies_of_the_last_export_is_named_and_the_export_done_again(whole: Path, tmp_path: Path) -> None:
    with Program(tmp_path / "run", ONLINE) as program:
        program.wait_for(program.is_in_last_export)
        victim = kill_rank(program)
        program.process.send_signal(signal.SIGCONT)
        assert program.finish() == 0, program.errors()
        said = program.errors()
    assert re.search(rf"^.*policy rank \d \(pid {victim} on \S+\) died in ", said, re.MULTILINE), said
    assert "checkpoints/step-00000006; cluster.max_restarts=3 leaves 2 more" in said
    assert metrics(program.folder) == metrics(whole)
    assert_equal_models(program.folder, whole)
