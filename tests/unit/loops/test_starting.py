"""What is said while a start takes long. Time is an argument."""

import socket
from pathlib import Path

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.activities import ACTIVITIES, Activity
from rlframe.cluster.watch.marks import Page
from rlframe.loops.reporting.starting import Starting, telling_what_is_awaited


def activity(name: str, **fields: object) -> Activity:
    return Activity(name=name, limit_s=60.0, setting="cluster.start_timeout_s", **fields)


def worker(rank: int, folder: Path = Path("/nowhere")) -> WorkerInfo:
    log = str(folder / f"policy-{rank}.log")
    return WorkerInfo(role="policy", rank=rank, node_id="n", host=socket.gethostname(), address="", pid=1, log=log)


def test_short_stages_say_nothing_however_many_they_are() -> None:
    said: list[str] = []
    starting = Starting(said.append, now=0.0)
    for second in range(0, 40, 4):
        with ACTIVITIES.doing(activity(f"stage {second}", is_call=True)):
            starting.look(second + 0.0)
            starting.look(second + 3.9)
    assert said == []


def test_a_long_stage_is_said_every_five_seconds() -> None:
    said: list[str] = []
    starting = Starting(said.append, now=0.0)
    for tick in range(0, 25):
        starting.look(tick / 2)
    words = "imports and checks; after an install Python compiles the packages once"
    assert said == [f"starting for 5 s: {words}", f"starting for 10 s: {words}"]
    with ACTIVITIES.doing(activity("the run", is_run=True)):
        starting.look(13.0)
        starting.look(18.0)
        assert said[2:] == ["starting for 18 s: data and plans, in the driver"]
        with ACTIVITIES.doing(activity("evaluation")):
            starting.look(19.0)
            starting.look(24.0)
    assert said[3:] == ["starting for 24 s: evaluation"]


def test_a_line_names_who_is_awaited_and_their_last_marks(tmp_path: Path) -> None:
    said: list[str] = []
    page = Page(tmp_path / "policy-1.mark", create=True)
    page.write("loading model.safetensors", num_calls=1)
    waits = activity("start", is_call=True, waits_for=[worker(1, tmp_path)], not_started=["policy rank 2"])
    with ACTIVITIES.doing(activity("the run", is_run=True)), ACTIVITIES.doing(waits):
        starting = Starting(said.append, now=0.0)
        starting.look(1.0)
        starting.look(6.0)
        # An answer that arrives is no new stage: the next line still comes five seconds after the last.
        waits.not_started.clear()
        starting.look(10.0)
        starting.look(11.0)
    page.close()
    assert said == [
        "starting for 6 s: start, waiting for policy rank 2, policy rank 1 (loading model.safetensors)",
        "starting for 11 s: start, waiting for policy rank 1 (loading model.safetensors)",
    ]


def test_many_workers_are_counted() -> None:
    said: list[str] = []
    waits = activity("calibrate", is_call=True, waits_for=[worker(rank) for rank in range(9)])
    with ACTIVITIES.doing(waits):
        starting = Starting(said.append, now=0.0)
        starting.look(0.0)
        starting.look(5.0)
    assert said[0].endswith("policy rank 2, policy rank 3 and 5 more")


def test_nothing_is_said_after_the_start() -> None:
    with telling_what_is_awaited() as over:
        over()
