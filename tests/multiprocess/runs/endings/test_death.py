"""A worker that dies in the middle of a run ends it with a sentence."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.multiprocess.program import DEADLINE_S, LEARNING, Program, titled

ENDLESS = {"steps": 100000, "rollout.num_engines": 1, "rollout.max_restarts": 0, "cluster.max_restarts": 0}


@pytest.mark.parametrize(
    ("title", "role"),
    [
        pytest.param("ray::MegatronWorker", "policy", id="policy"),
        pytest.param("ray::RolloutWorker", "rollout", id="engine", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_worker_is_named_and_nothing_is_left_behind(tmp_path: Path, title: str, role: str) -> None:
    with Program(tmp_path / "run", LEARNING | ENDLESS) as program:
        program.wait_for_step(3)
        victim = next(process for process in program.children if titled(process, title))
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        assert program.finish() == 1
        assert time.monotonic() - killed < DEADLINE_S / 2, "it waits for no limit of time"
        assert program.survivors() == []
        message = program.errors()
    named = re.search(rf"^{role} rank \d \(pid (\d+) on (\S+)\) died in \w+", message, re.MULTILINE)
    assert named, message
    assert (int(named[1]), named[2]) == (victim.pid, socket.gethostname())
    assert "last lines of" in message and f"logs/{role}-" in message
    assert "Traceback" not in message, message
