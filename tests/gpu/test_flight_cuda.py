"""NCCL's flight records say who waits in which collective and who has not come. Needs two GPUs."""

import multiprocessing
import os
import socket
import time
from pathlib import Path

import pytest
import torch

from rlframe.cluster.watch.flight import RING, absent, read_flight, write_flight

pytestmark = pytest.mark.gpu


def rank_that_meets(rank: int, port: int, folder: str) -> None:
    """Joins two all-reduces; rank 0 enters a third, to which rank 1 does not come."""
    os.environ.update(RING)
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    numbers = torch.ones(3, device="cuda")
    dist.all_reduce(numbers)
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(numbers)
    time.sleep(5.0)
    write_flight(Path(folder) / f"{rank}.json")
    os._exit(0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_rank_that_did_not_come_is_found(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=rank_that_meets, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    flights = {rank: read_flight(tmp_path / f"{rank}.json") for rank in range(2)}
    found = absent(flights, 0)
    assert found, [(tmp_path / f"{rank}.json").read_text()[:3000] for rank in range(2)]
    entered, missing = found
    # Of the group's three all-reduces rank 0 is in the third.
    assert (entered.name, entered.ranks, entered.number, missing) == ("nccl:all_reduce", (0, 1), 3, [1])
    assert absent(flights, 1) is None
