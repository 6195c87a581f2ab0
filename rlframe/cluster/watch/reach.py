"""Whether somebody listens at a network address, asked before a library does that waits for minutes."""

import socket

CONNECT_S = 5.0
"""How long a machine may take to accept a connection."""


def refusal(address: str) -> str | None:
    """Returns why nothing can be reached at `host:port`, such as Connection refused; None where something listens, or
    where the address has another form, such as `auto`."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not separator or not port.isdigit():
        return None
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return None
    except (OSError, OverflowError, UnicodeError) as error:
        return str(error)
