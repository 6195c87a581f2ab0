"""Host memory that a GPU copies from and to at full speed, taken in large pieces."""

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

PIECE_BYTES = 1 << 30
"""Bytes of a piece: while one is registered, other threads wait for the CUDA driver."""
MOST_THREADS = 8
"""Pieces that are made at a time. On an H200's host with 16 cores 8 GiB took 0.9 s in pieces of 1 GiB by 8 threads, 1.5
by 4, and 2.0 in one piece whose pages 16 threads wrote; the pages of one piece come no faster by more than four."""


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
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with _threads(-(-num_bytes // PIECE_BYTES)) as threads:
        list(threads.map(_bring, memory.split(PIECE_BYTES)))
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    if status := int(cudart.cudaHostRegister(address, num_bytes, 0)):
        raise torch.cuda.CudaError(status)
    pages.forget = partial(cudart.cudaHostUnregister, address)
    return memory


def _threads(count: int) -> ThreadPoolExecutor:
    """Returns threads for so many pieces, no more than this process may use."""
    return ThreadPoolExecutor(min(count, MOST_THREADS, torch.get_num_threads()))


def _bring(memory: Tensor) -> None:
    """Has the system provide the pages of new memory, which are zeros, by one write into each."""
    memory.numpy()[:: mmap.PAGESIZE] = 0


class Pieces:
    """Host memory in pieces of PIECE_BYTES, made by threads of its own while others go on."""

    def __init__(self, *, pinned: bool):
        self.pinned = pinned
        self.num_bytes = 0
        """Bytes of the pieces that are there or begun."""
        self._begun: list[Future[Tensor]] = []

    def grow(self, num_bytes: int) -> None:
        """Begins to grow to at least this many bytes. Does not wait."""
        missing = num_bytes - self.num_bytes
        if missing <= 0:
            return
        sizes = [PIECE_BYTES] * (missing // PIECE_BYTES) + [missing % PIECE_BYTES] * (missing % PIECE_BYTES > 0)
        threads = _threads(len(sizes))
        self._begun += [threads.submit(host_memory, size, pinned=self.pinned) for size in sizes]
        self.num_bytes += missing
        threads.shutdown(wait=False)

    def __getitem__(self, index: int) -> Tensor:
        """Returns a piece, which it waits for.

        Raises:
            torch.cuda.CudaError: see `host_memory`.
        """
        return self._begun[index].result()

    def all(self) -> list[Tensor]:
        """Returns all pieces. See `__getitem__`."""
        return [each.result() for each in self._begun]


def copied(values: Tensor) -> Tensor:
    """Returns a copy in host memory, which is pinned if `values` are on a GPU."""
    memory = host_memory(values.nbytes, pinned=values.is_cuda)
    return memory.view(values.dtype).view(values.shape).copy_(values.detach())
