"""Host memory that a GPU copies from and to at full speed, taken in large pieces."""

import mmap
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

PIECE_BYTES = 1 << 30
"""Bytes of a piece: while one is registered, other threads wait for the CUDA driver."""


class Pages(mmap.mmap):
    """Memory of no file, which CUDA must forget before the system gives its addresses to others."""

    forget: Callable[[], object] = staticmethod(lambda: None)
    """Undoes its registration."""

    def __del__(self) -> None:
        # Before the pages go; a weak reference's finalizer would run after it.
        self.forget()


def host_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """Returns zeros in host memory, as bytes [num_bytes]. The pages of pinned memory are there already; others come
    with the first write.

    `cudaHostAlloc`, which torch pins by, gave 1.0 GB a second on the host of an H100, and a forward pass in another
    thread stood still until it was done. Pages that are written first and registered afterwards took 0.3 s a GB, of
    which the registration took 0.05 (8 GiB, torch 2.11, CUDA 13). torch's allocator does so with
    `pinned_use_cuda_host_register`, but for small buffers too.

    Raises:
        torch.cuda.CudaError: CUDA does not register the memory, for instance beyond a limit of locked memory.
    """
    if not pinned or num_bytes == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    pages = Pages(-1, num_bytes)
    # Fewer pages to write and to register, where the system has large ones.
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    if status := int(cudart.cudaHostRegister(address, num_bytes, 0)):
        raise torch.cuda.CudaError(status)
    pages.forget = partial(cudart.cudaHostUnregister, address)
    return memory


def copied(values: Tensor) -> Tensor:
    """Returns a copy in host memory, which is pinned if `values` are on a GPU."""
    memory = host_memory(values.nbytes, pinned=values.is_cuda)
    return memory.view(values.dtype).view(values.shape).copy_(values.detach())
