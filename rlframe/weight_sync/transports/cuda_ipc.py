"""`cuda_ipc`: between GPUs of one host. Each destination opens the sources' parameter buffers and pulls all its pieces
in a few launches over a table of addresses.

A handle is opened on the device that reads. If it is opened on the exporting device, as torch rebuilds a tensor, copies
may read it but kernels of another device may not (illegal memory access with torch 2.11, although peer access is on).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.plan.copies import Copies
from rlframe.weight_sync.transports.base import Link, RankInfo, Transport

DEVICE = 6
"""Index of the device among the arguments of torch's rebuild function."""


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """One storage of the source process."""

    rebuild: Any
    arguments: tuple[Any, ...]
    address: int
    """Address in the source process."""


@dataclass(frozen=True, slots=True)
class SharedGpuMemory:
    """Handle of the parameters of one process, for processes of the same host."""

    pid: int
    uuid: str
    """GPU UUID."""
    buffers: tuple[SharedBuffer, ...]
    parameters: dict[str, tuple[int, int, torch.dtype]]
    """Parameters by name: index of the buffer, bytes from its start, number format."""


_shared: dict[int, SharedBuffer] = {}
"""Exported buffers by address. A second export would count a second reader who never comes."""


def share(parameters: Mapping[str, Tensor]) -> SharedGpuMemory:
    """Returns handles of the storages under `parameters`, which must not move as long as anyone reads them.

    Raises:
        WeightSyncFailed: a parameter is not on a GPU, or its memory cannot be exported.
    """
    buffers: list[SharedBuffer] = []
    index_of: dict[int, int] = {}
    entries = {}
    for name, parameter in parameters.items():
        if parameter.device.type != "cuda":
            raise WeightSyncFailed(f"transport cuda_ipc is for parameters on a GPU; {name} is on {parameter.device}")
        storage = parameter.untyped_storage()
        address = storage.data_ptr()
        if address not in index_of:
            index_of[address] = len(buffers)
            _shared[address] = _shared.get(address) or _export(storage, name)
            buffers.append(_shared[address])
        offset = int(parameter.storage_offset()) * parameter.dtype.itemsize
        entries[name] = (index_of[address], offset, parameter.dtype)
    device = next(iter(parameters.values())).device
    # Kernels launched by training must finish before anyone reads.
    torch.cuda.synchronize(device)
    return SharedGpuMemory(os.getpid(), uuid_of(device), tuple(buffers), entries)


def _export(storage: torch.UntypedStorage, name: str) -> SharedBuffer:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    try:
        rebuild, arguments = reduce_tensor(data)
    except RuntimeError as error:
        raise WeightSyncFailed(
            f"the memory of {name} cannot be opened by other processes ({error}); with expandable_segments in "
            "PYTORCH_ALLOC_CONF CUDA IPC does not work: remove the option, or set weight_sync.transport=nccl"
        ) from error
    return SharedBuffer(rebuild, arguments, storage.data_ptr())


def open_shared(memory: SharedGpuMemory, device: torch.device) -> list[Tensor]:
    """Returns the buffers of another process as bytes that `device` can read, in their order.

    Raises:
        WeightSyncFailed: the process is gone, or `device` cannot reach its GPU.
    """
    if memory.uuid != uuid_of(device):
        peers = {uuid_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
        if memory.uuid not in peers:
            raise WeightSyncFailed(
                f"GPU {memory.uuid} of process {memory.pid} is not visible to process {os.getpid()}, so its weights "
                "cannot be read from here; leave all GPUs of a host visible, or set weight_sync.transport=nccl"
            )
        if not torch.cuda.can_device_access_peer(device, peers[memory.uuid]):
            raise WeightSyncFailed(f"{device} cannot read GPU {memory.uuid}; set weight_sync.transport=nccl")
    try:
        return [
            buffer.rebuild(*buffer.arguments[:DEVICE], device.index, *buffer.arguments[DEVICE + 1 :])
            for buffer in memory.buffers
        ]
    except RuntimeError as error:
        raise WeightSyncFailed(
            f"cannot open the weights of process {memory.pid} on GPU {memory.uuid}: {error}. It must be alive, on this "
            "host and of the same user"
        ) from error


def uuid_of(device: torch.device) -> str:
    """Returns the UUID of a GPU, which is the same in every process, whatever devices are visible to it."""
    return str(torch.cuda.get_device_properties(device).uuid)


class CudaIpc(Transport):
    """Pulls with one launch for each width of box."""

    share = staticmethod(share)

    def __init__(self) -> None:
        self._opened: list[Tensor] = []
        self._parts: list[list[Any]] = []
        self._device = torch.device("cuda")

    @staticmethod
    def refusal(source: RankInfo, destination: RankInfo) -> str | None:
        for rank in (source, destination):
            if rank.on_cpu:
                return "cuda_ipc works between GPUs, not with parameters on the CPU"
        if source.host != destination.host:
            return f"cuda_ipc works within one host, not from {source.host} to {destination.host}"
        return None

    def open_destination(self, parameters: Mapping[str, Tensor], link: Link) -> None:
        self.close()
        self._device = next(iter(parameters.values())).device
        addresses = {
            rank: self._addresses(link.memories[rank])
            for rank in sorted({rank for part in link.parts for rank in part.sources})
        }
        self._parts = [_tables(part, parameters, addresses, link.memories, self._device) for part in link.parts]
        torch.cuda.synchronize(self._device)

    def _addresses(self, memory: SharedGpuMemory) -> list[int]:
        """Returns the address of each buffer of `memory` in this process."""
        if memory.pid == os.getpid():
            return [buffer.address for buffer in memory.buffers]
        opened = open_shared(memory, self._device)
        self._opened += opened
        return [buffer.data_ptr() for buffer in opened]

    def pull(self, part: int = 0) -> None:
        with torch.cuda.device(self._device):
            for table in self._parts[part]:
                table.run()
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._parts = []
        self._opened = []


def _tables(
    copies: Copies,
    parameters: Mapping[str, Tensor],
    addresses: Mapping[int, list[int]],
    memories: Sequence[SharedGpuMemory],
    device: torch.device,
) -> list[Any]:
    """Returns one CopyTable for each pair of number formats."""
    # Triton exists only with CUDA. This file must be importable without it, to report that the transport is
    # unavailable.
    from rlframe.weight_sync.plan.copy_kernels import CopyTable  # noqa: PLC0415

    sources = np.zeros((len(copies), 3), dtype=np.int64)  # address, bytes of an element, number format
    formats = list({dtype for rank in copies.sources for *_, dtype in memories[rank].parameters.values()})
    for rank in copies.sources:
        known = np.zeros((len(copies.read_parameters), 3), dtype=np.int64)
        for index, name in enumerate(copies.read_parameters):
            if name in memories[rank].parameters:
                buffer, offset, dtype = memories[rank].parameters[name]
                known[index] = (addresses[rank][buffer] + offset, dtype.itemsize, formats.index(dtype))
        mine = copies.column("source") == rank
        sources[mine] = known[copies.column("read_parameter")[mine]]
    written = [parameters[name] for name in copies.write_parameters]
    targets = np.array([value.data_ptr() for value in written], dtype=np.int64)[copies.column("write_parameter")]
    sizes = np.array([value.dtype.itemsize for value in written], dtype=np.int64)[copies.column("write_parameter")]
    targets = targets + copies.column("write_offset") * sizes
    reads = sources[:, 0] + copies.column("read_offset") * sources[:, 1]
    strides = [copies.column(f"{side}_{axis}_stride") for side in ("read", "write") for axis in ("row", "col")]
    pairs = np.stack([reads, targets, copies.column("rows"), copies.column("cols"), *strides], axis=1)
    kinds = [value.dtype for value in written]
    tables = []
    for kind, target in sorted({(kind, dtype) for kind in range(len(formats)) for dtype in kinds}, key=str):
        holds = np.array([dtype is target for dtype in kinds])[copies.column("write_parameter")]
        mine = (sources[:, 2] == kind) & holds
        if mine.any():
            lanes = copies.column("source")[mine]
            tables.append(CopyTable(pairs[mine], formats[kind], target, device, lanes=lanes))
    return tables


TRANSPORT = CudaIpc
