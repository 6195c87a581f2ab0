"""The address at which ranks meet is taken from the moment it is known."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from rlframe.utils.process.rendezvous import listen


def test_nobody_else_can_take_the_port_of_a_rendezvous_and_rank_0_can_use_it() -> None:
    store = listen("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", store.port))
    address = f"tcp://127.0.0.1:{store.port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        dist.barrier()
        assert listen("127.0.0.1").port != store.port
    finally:
        dist.destroy_process_group()
