"""`shm`: between processes of one CPU host. Each destination maps the sources' parameters and copies directly from
them.

The memory behind the parameters is a memfd, which other processes open as /proc/<pid>/fd/<n>. Unlike torch's files in
/dev/shm it has no name: no file remains whatever kills the process, and a small /dev/shm (64 MB in a container by
default) is no limit.
"""

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import window
from rlframe.weight_sync.plan.copies import Copy, Place
from rlframe.weight_sync.transports.base import Link, RankInfo, Transport

SWAP = "_swap_data_ptr_"
"""Torch's only operation that changes the memory under a storage of which others hold views."""


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """One memory file of the source process."""

    fd: int
    """File descriptor in the source process."""
    num_bytes: int
    inode: int
    """Inode of the file. It distinguishes it from another file under the same pid and descriptor, after the source
    died."""


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """One parameter within a shared storage."""

    storage: int
    """Index in `SharedMemoryHandle.storages`."""
    offset: int
    """Elements from the start of the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """Handle of the parameters of one process, for processes of the same host and user."""

    pid: int
    storages: tuple[SharedStorage, ...]
    parameters: dict[str, SharedParameter]


def share(parameters: Mapping[str, Tensor]) -> SharedMemoryHandle:
    """Moves the storages of `parameters` into memory that other processes can map.

    The storages stay the same objects, so that every other view of them (Megatron's flat buffers, the optimizer's
    slices) follows. Storages that are already shared are not moved.

    Raises:
        WeightSyncFailed: a parameter is not on the CPU.
    """
    storages: list[SharedStorage] = []
    index_of: dict[int, int] = {}
    entries = {}
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu":
            raise WeightSyncFailed(f"transport shm is for parameters on the CPU; {name} is on {parameter.device}")
        storage = parameter.untyped_storage()
        if storage._cdata not in index_of:
            index_of[storage._cdata] = len(storages)
            storages.append(_share_storage(storage))
        index, offset = index_of[storage._cdata], int(parameter.storage_offset())
        entries[name] = SharedParameter(index, offset, tuple(parameter.shape), parameter.stride(), parameter.dtype)
    return SharedMemoryHandle(os.getpid(), tuple(storages), entries)


def open_shared(handle: SharedMemoryHandle) -> dict[str, Tensor]:
    """Returns the parameters of another process, in that process's memory. They must only be read, and are unmapped
    when they are freed.

    Raises:
        WeightSyncFailed: the process is gone, or belongs to another host or user.
    """
    storages = [_open_storage(handle.pid, storage) for storage in handle.storages]
    return {
        name: torch.empty(0, dtype=entry.dtype).set_(storages[entry.storage], entry.offset, entry.shape, entry.stride)
        for name, entry in handle.parameters.items()
    }


class SharedMemory(Transport):
    """Pulls with one copy per piece."""

    share = staticmethod(share)

    def __init__(self) -> None:
        self._parts: list[list[tuple[Tensor, Tensor]]] = []

    @staticmethod
    def refusal(source: RankInfo, destination: RankInfo) -> str | None:
        for rank in (source, destination):
            if not rank.on_cpu:
                return f"shm works between parameters on the CPU, not on GPU {rank.device}"
        if not hasattr(torch.UntypedStorage, SWAP):
            return (
                f"shm needs a torch that can change the memory under a storage, 2.13 or newer, not {torch.__version__}"
            )
        if source.host != destination.host:
            return f"shm works within one host, not from {source.host} to {destination.host}"
        return None

    def open_destination(self, parameters: Mapping[str, Tensor], link: Link) -> None:
        opened = {rank: open_shared(link.memories[rank]) for part in link.parts for rank in part.sources}
        self._parts = [
            [(_view(parameters, copy, copy.write), _view(opened[copy.source], copy, copy.read)) for copy in part]
            for part in link.parts
        ]

    def pull(self, part: int = 0) -> None:
        for destination, source in self._parts[part]:
            destination.copy_(source)

    def close(self) -> None:
        self._parts = []


def allocate(num_bytes: int) -> torch.UntypedStorage:
    """Returns new memory that other processes can map: `share` finds it. Its file is closed when it is freed."""
    storage, fd = _create(num_bytes)
    _close_with(storage, fd)
    return storage


def _view(parameters: Mapping[str, Tensor], copy: Copy, place: Place) -> Tensor:
    """Returns [rows, cols] one side of a copy."""
    size, stride = (copy.rows, copy.cols), (place.row_stride, place.col_stride)
    return window(parameters[place.parameter], place.offset, size, stride)


def _share_storage(storage: torch.UntypedStorage) -> SharedStorage:
    folder = f"/proc/{os.getpid()}/fd/"
    if storage.filename and storage.filename.startswith(folder):
        fd = int(storage.filename.removeprefix(folder))
    else:
        shared, fd = _create(storage.nbytes())
        shared.copy_(storage)
        getattr(storage, SWAP)(shared)
        _close_with(storage, fd)
    return SharedStorage(fd, storage.nbytes(), os.fstat(fd).st_ino)


def _create(num_bytes: int) -> tuple[torch.UntypedStorage, int]:
    """Returns a new memory file as a storage, and its file descriptor, which stays open for other processes."""
    fd = os.memfd_create("rlframe-weights", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return _map(f"/proc/{os.getpid()}/fd/{fd}", num_bytes), fd


def _close_with(storage: torch.UntypedStorage, fd: int) -> None:
    """Closes the file when the last tensor of the storage is freed."""
    weakref.finalize(storage, os.close, fd).atexit = False


def _open_storage(pid: int, storage: SharedStorage) -> torch.UntypedStorage:
    path = f"/proc/{pid}/fd/{storage.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncFailed(
            f"cannot map the weights of process {pid}: {error.strerror}. It must be alive, on this host, in this "
            "process namespace and of the same user"
        ) from error
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (storage.inode, storage.num_bytes):
            raise WeightSyncFailed(f"process {pid} is not the one that shared its weights; it must have been restarted")
        return _map(f"/proc/self/fd/{fd}", storage.num_bytes)
    finally:
        os.close(fd)


def _map(path: str, num_bytes: int) -> torch.UntypedStorage:
    """Returns the file's bytes as a storage, shared with all others that map it."""
    storage = torch.UntypedStorage.from_file(path, True, num_bytes)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


TRANSPORT = SharedMemory
