"""Looks at other machines by a thread that may outlive the run's connection to Ray, and at processes that may end
meanwhile."""

import queue
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest
import ray
from ray._private import auto_init_hook

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch import looking
from rlframe.cluster.watch.looking import halted_processes, look_remotely
from rlframe.cluster.watch.sight import Sight, State
from tests.until import until


def test_a_look_after_the_run_has_left_ray_knows_nothing_and_connects_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As rlframe.cluster.runtime sets it.
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", False)
    assert not ray.is_initialized()
    worker = WorkerInfo(role="policy", rank=0, node_id="0" * 56, host="node", address="198.51.100.3", pid=7, log="log")
    answers: queue.SimpleQueue[list[Sight]] = queue.SimpleQueue()
    look_remotely([worker, worker], False, answers)
    assert answers.get_nowait() == [Sight(state=State.UNKNOWN)] * 2
    assert not ray.is_initialized()


def test_a_dead_process_may_be_gone_before_its_name_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog ended with an error where a dead child was reaped between the two."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)

    def title(process: psutil.Process, own: Callable[[psutil.Process], str] = looking.title) -> str:
        try:
            return own(process)
        finally:
            child.wait()

    monkeypatch.setattr(looking, "title", title)
    assert halted_processes() == []
    assert child.returncode == 0
