"""Looks at other machines by a thread that may outlive the run's connection to Ray."""

import queue

import pytest
import ray
from ray._private import auto_init_hook

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.looking import look_remotely
from rlframe.cluster.watch.sight import Sight, State


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
