"""A worker that dies in the middle of a run ends it with a sentence."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.placement import reserve
from rlframe.cluster.roles import Topology, policy
from rlframe.cluster.runtime import running
from rlframe.cluster.worker import Worker
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.utils.errors import WorkerDied
from tests.multiprocess.program import LEARNING, Program, titled

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
        assert time.monotonic() - killed < 30
        assert program.survivors() == []
        message = program.errors()
    named = re.search(rf"^{role} rank \d \(pid (\d+) on (\S+)\) died in \w+", message, re.MULTILINE)
    assert named, message
    assert (int(named[1]), named[2]) == (victim.pid, socket.gethostname())
    assert "last lines of" in message and f"logs/{role}-" in message
    assert "Traceback" not in message, message


class Peer(Worker):
    """One of two ranks that talk to each other."""

    def lose(self, peer: int) -> None:
        """The other rank dies, and this one notices at once."""
        os.kill(peer, signal.SIGKILL)
        raise RuntimeError("Connection closed by peer")

    def listen(self) -> None:
        """Until killed."""
        time.sleep(600)


def test_the_rank_that_died_is_named_and_not_the_one_that_lost_its_connection(tmp_path: Path) -> None:
    with running(ClusterConfig(), num_devices=2):
        placement = reserve(Topology((policy(2),)), gpu=False, timeout_s=60)
        peers = WorkerGroup(
            Peer,
            role="policy",
            slots=placement.policy,
            log_folder=str(tmp_path),
            num_threads=1,
            start_timeout_s=180,
            call_timeout_s=60,
        )
        first, second = peers.actors
        with pytest.raises(WorkerDied, match=r"^policy rank 1 \(pid \d+ on .*\) died in train"):
            peers.wait([first.lose.remote(peers.infos[1].pid), second.listen.remote()], doing="train")
