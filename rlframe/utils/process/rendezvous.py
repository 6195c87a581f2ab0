"""A torch.distributed rendezvous that listens on one address."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def listen(host: str, port: int = 0, *, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """Returns a store that listens on `port` of `host`, or on a port that the system chooses.

    A port that was only looked up could belong to another program when it is used. torch's own socket would listen on
    every interface. A rank 0 in this process that gets the port shares the store, as with torch's own.
    """
    listener = socket.create_server((host, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    # The store closes the socket that it is given.
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
