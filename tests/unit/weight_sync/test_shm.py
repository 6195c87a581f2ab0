"""The shm transport between real processes."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.memory import record
from rlframe.weight_sync.plan.copies import Copies
from rlframe.weight_sync.plan.planner import Plan, make_plan
from rlframe.weight_sync.transports import shm
from rlframe.weight_sync.transports.base import Link, RankInfo
from rlframe.weight_sync.transports.shm import SharedMemory, SharedMemoryHandle, open_shared, share

pytestmark = pytest.mark.later


def flat_parameters() -> tuple[Tensor, dict[str, Tensor]]:
    """A flat buffer of 20 elements and two parameters that are views of it, as Megatron's DDP makes them."""
    flat = torch.arange(20.0)
    return flat, {"a": torch.nn.Parameter(flat[2:14].view(4, 3)), "b": flat[14:20]}


def serve(pipe: Connection) -> None:
    """The source process: shares its parameters, then changes them through the flat buffer whenever told to."""
    flat, parameters = flat_parameters()
    pipe.send(share(parameters))
    while pipe.recv():
        flat.add_(100)
        pipe.send("changed")


def link_of(plan: Plan, handle: SharedMemoryHandle) -> Link:
    """Of the one destination."""
    parts = (Copies.of((0, copy) for copy in plan.copies_for(0)),)
    return Link(transport="shm", rank=0, num_sources=1, num_destinations=1, parts=parts, memories=(handle,), dtypes={})


def mapped() -> list[int]:
    """Returns the inodes of the weights that this process maps. Files elsewhere may have the same numbers."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [int(line.split()[4]) for line in lines if "rlframe-weights" in line]


@contextmanager
def source_process() -> Iterator[tuple[multiprocessing.Process, Connection, SharedMemoryHandle]]:
    """A spawned source with its handle; killed at the end."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()  # Else nobody would learn of its death.
    try:
        yield process, pipe, pipe.recv()
    finally:
        process.kill()
        process.join()


def test_sharing_is_in_place_for_every_view() -> None:
    flat, parameters = flat_parameters()
    handle = share(parameters)
    assert flat.tolist() == list(range(20))
    flat.mul_(2)
    assert parameters["b"].tolist() == [28, 30, 32, 34, 36, 38]
    seen = open_shared(handle)
    assert torch.equal(seen["a"], parameters["a"]) and torch.equal(seen["b"], parameters["b"])
    assert len(handle.storages) == 1


def test_sharing_again_moves_nothing() -> None:
    flat, parameters = flat_parameters()
    first = share(parameters)
    address = flat.data_ptr()
    assert share(parameters) == first and flat.data_ptr() == address


def open_files() -> set[str]:
    """The memory files of weights that this process has open."""
    links = {path.name: path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return {name for name, target in links.items() if target.startswith("memfd:rlframe-weights")}


def test_a_memory_file_is_open_as_long_as_a_tensor_has_its_memory() -> None:
    before = open_files()
    flat, parameters = flat_parameters()
    handle = share(parameters)
    assert open_files() - before == {str(handle.storages[0].fd)}
    del flat, parameters["b"]
    assert open_shared(handle)["a"].sum() == sum(range(2, 14))
    del parameters
    assert open_files() <= before


def test_pull_copies_what_the_source_holds_now() -> None:
    tensors = {"a": (4, 3), "b": (6,)}
    source = record(lambda p, c: [p[name].copy_(c[name]) for name in tensors], flat_parameters()[1], tensors)
    mine = {"a": torch.zeros(3, 4).t(), "b": torch.zeros(6, dtype=torch.bfloat16)}
    layout = record(lambda p, c: [p[name].copy_(c[name]) for name in tensors], mine, tensors)
    plan = make_plan([source], [layout], source_hosts=["h"], destination_hosts=["h"])
    with source_process() as (_, pipe, handle):
        transport = SharedMemory()
        transport.open_destination(mine, link_of(plan, handle))
        for round_number in range(2):
            transport.pull()
            expected = torch.arange(2.0, 20.0) + 100 * round_number
            assert torch.equal(mine["a"], expected[:12].view(4, 3))
            assert torch.equal(mine["b"], expected[12:].bfloat16())
            pipe.send(True)
            pipe.recv()
        transport.close()


def test_a_killed_source_leaves_nothing_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    with source_process() as (process, _, handle):
        opened = open_shared(handle)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        # What is mapped stays readable; nothing with a name was ever made.
        assert opened["b"].tolist() == [14, 15, 16, 17, 18, 19]
        names = tuple(f"torch_{pid}_" for pid in (os.getpid(), process.pid))
        assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith(names)]
        with pytest.raises(WeightSyncFailed, match=f"cannot map the weights of process {process.pid}"):
            open_shared(handle)


def test_close_unmaps_the_source() -> None:
    tensors = {"a": (4, 3), "b": (6,)}
    layout = record(lambda p, c: [p[name].copy_(c[name]) for name in tensors], flat_parameters()[1], tensors)
    plan = make_plan([layout], [layout], source_hosts=["h"], destination_hosts=["h"])
    with source_process() as (_, _, handle):
        transport = SharedMemory()
        transport.open_destination(flat_parameters()[1], link_of(plan, handle))
        assert handle.storages[0].inode in mapped()
        transport.close()
        assert handle.storages[0].inode not in mapped()


def test_a_restarted_source_is_told_apart() -> None:
    _, parameters = flat_parameters()
    handle = share(parameters)
    storage = handle.storages[0]
    other = SharedMemoryHandle(
        handle.pid, (type(storage)(storage.fd, storage.num_bytes, storage.inode + 1),), handle.parameters
    )
    with pytest.raises(WeightSyncFailed, match="is not the one that shared its weights"):
        open_shared(other)


def test_a_torch_that_cannot_change_the_memory_under_a_storage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankInfo(host="here", device="cpu", pid=1)
    assert SharedMemory.refusal(rank, rank) is None
    monkeypatch.setattr(shm, "SWAP", "_what_no_torch_has_")
    assert "shm needs a torch" in (SharedMemory.refusal(rank, rank) or "")
