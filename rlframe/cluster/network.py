"""The network interface by which the workers of a cluster reach each other."""

import os
import socket
from functools import cache

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def use_address(address: str) -> None:
    """Makes gloo connect through the interface that has `address`, unless the environment names one.

    gloo would take the address to which the machine's own name leads. On Debian and Ubuntu that is 127.0.1.1, which no
    other machine reaches (torch 2.13).
    """
    if GLOO_INTERFACE not in os.environ and (name := interface_of(address)):
        os.environ[GLOO_INTERFACE] = name


@cache
def is_here(host: str, address: str) -> bool:
    """Returns whether a machine with this name and address is the present one. Machines of a cluster may share a name,
    and a process of another one must not be taken for one of this machine."""
    return host == socket.gethostname() and interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """Returns the name of the interface of this machine that has the IP address, or None."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family in kinds and each.address.partition("%")[0] == address for each in addresses):
            return name
    return None
