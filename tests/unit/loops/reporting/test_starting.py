"""What a start waits for, in words."""

import socket
from pathlib import Path

import pytest

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.activities import ACTIVITIES, Activity
from rlframe.cluster.watch.marks import Page
from rlframe.loops.reporting import starting
from rlframe.loops.reporting.starting import awaited


def activity(name: str, **fields: object) -> Activity:
    return Activity(name=name, limit_s=60.0, setting="cluster.start_timeout_s", **fields)


def worker(rank: int, folder: Path = Path("/nowhere")) -> WorkerInfo:
    log = str(folder / f"policy-{rank}.log")
    return WorkerInfo(role="policy", rank=rank, node_id="n", host=socket.gethostname(), address="", pid=1, log=log)


def test_each_stage_has_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # The runner of the tests may be an import itself.
    monkeypatch.setattr(starting, "importing", str)
    assert awaited() == "checks of the configuration and the data"
    with ACTIVITIES.doing(activity("the run", is_run=True)):
        assert awaited() == "data and plans, in the driver"
        with ACTIVITIES.doing(activity("evaluation")):
            assert awaited() == "evaluation"


def test_who_is_awaited_is_named_with_the_last_marks(tmp_path: Path) -> None:
    page = Page(tmp_path / "policy-1.mark", create=True)
    page.write("loading model.safetensors", num_calls=1)
    waits = activity("start", is_call=True, waits_for=[worker(1, tmp_path)], not_started=["policy rank 2"])
    with ACTIVITIES.doing(activity("the run", is_run=True)), ACTIVITIES.doing(waits):
        assert awaited() == "start, waiting for policy rank 2, policy rank 1 (loading model.safetensors)"
        waits.not_started.clear()
        assert awaited() == "start, waiting for policy rank 1 (loading model.safetensors)"
    page.close()


def test_many_workers_are_counted() -> None:
    with ACTIVITIES.doing(activity("calibrate", is_call=True, waits_for=[worker(rank) for rank in range(9)])):
        assert awaited().endswith("policy rank 2, policy rank 3 and 5 more")
