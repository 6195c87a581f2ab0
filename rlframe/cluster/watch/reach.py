"""Checks whether a network address accepts connections, before a library waits for it for minutes."""

import socket

CONNECT_S = 5.0
"""Seconds that a machine may take to accept a connection."""


def refusal(address: str) -> str | None:
    """Returns why nothing can be reached at `host:port`, such as Connection refused. None if something listens there,
    or if the address has another form, such as `auto`."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not separator or not port.isdigit():
        return None
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return None
    except (OSError, OverflowError, UnicodeError) as error:
        return str(error)
