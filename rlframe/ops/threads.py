"""Threads of torch's operators in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Has this thread compute alone inside the block.

    Threads of OpenMP wait for each other by spinning. Where other processes have the cores, an operator on a few
    thousand tokens then takes ten times as long, on as many cores as there are threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
