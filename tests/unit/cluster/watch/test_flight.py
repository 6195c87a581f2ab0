"""Flight records of real ranks say who waits in which collective and who has not come."""

import json
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from rlframe.cluster.watch.flight import RING, Entered, Flight, absent, read_flight, write_flight

pytestmark = pytest.mark.later


def rank_that_meets(rank: int, port: int, folder: str) -> None:
    """Joins two all-reduces of a group; rank 0 enters a third, to which rank 1 does not come."""
    os.environ.update(RING)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    numbers = torch.ones(3)
    group, _ = dist.new_group([0, 1]), dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(numbers, group=group)
    dist.all_reduce(numbers, group=group)
    if rank == 0:
        threading.Thread(target=dist.all_reduce, args=(numbers,), kwargs={"group": group}, daemon=True).start()
    time.sleep(1.0)
    write_flight(Path(folder) / f"{rank}.json")
    os._exit(0)


def test_the_rank_that_did_not_come_is_found(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=rank_that_meets, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    flights = {rank: read_flight(tmp_path / f"{rank}.json") for rank in range(2)}
    found = absent(flights, 0)
    assert found
    entered, missing = found
    # Of the group's three all-reduces rank 0 is in the third.
    assert (entered.name, entered.ranks, entered.number, missing) == ("gloo:all_reduce", (0, 1), 3, [1])
    assert str(entered) == "gloo:all_reduce number 3 of ranks 0, 1"
    assert absent(flights, 1) is None and not flights[1].inside


def entered(number: int) -> Entered:
    """In a group of three."""
    return Entered(name="nccl:all_gather", group="7", ranks=(0, 1, 2), number=number)


def test_a_rank_without_a_record_has_not_come() -> None:
    reached = {("7", (0, 1, 2)): 5}
    flights = {0: Flight(inside=(entered(5),), reached=reached), 1: Flight(inside=(entered(5),), reached=reached)}
    assert absent(flights, 0) == (entered(5), [2])


def test_nobody_is_missing_where_all_are_inside() -> None:
    flight = Flight(inside=(entered(5),), reached={("7", (0, 1, 2)): 5})
    assert absent(dict.fromkeys(range(3), flight), 0) is None


def test_a_record_that_is_missing_or_torn_says_nothing(tmp_path: Path) -> None:
    assert read_flight(tmp_path / "none.json") == Flight(inside=(), reached={})
    (tmp_path / "torn.json").write_text(json.dumps([{}])[:-1])
    assert read_flight(tmp_path / "torn.json").inside == ()
