"""A torch.distributed rendezvous that listens on one address."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def listen(host: str, port: int = 0, *, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """Returns a store that listens on `port` of `host`, or on one that the system chose.

    A port that was only looked up could be another program's by the time it is used. torch's own socket would listen on
    every interface. A rank 0 in this process that is told the port shares the store, as with torch's own.
    """
    listener = socket.create_server((host, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    # The store closes what it is given.
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
