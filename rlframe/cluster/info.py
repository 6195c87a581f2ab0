"""Locations of the processes of a run."""

import pathlib
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
"""Address of a node that no other machine reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """Location of a worker."""

    role: str
    rank: int
    node_id: str
    """Ray's id of the node."""
    host: str
    address: str
    """IP address at which other nodes reach the worker."""
    pid: int
    log: str
    """Path of the worker's log on its node."""

    @property
    def path(self) -> pathlib.Path:
        """The path of the worker's log."""
        return pathlib.Path(self.log)

    def __str__(self) -> str:
        # Machines of a cluster may share a name, or have one that only they know.
        place = self.host if self.address in ("", LOOPBACK) else f"{self.host}, {self.address}"
        return f"{self.role} rank {self.rank} (pid {self.pid} on {place})"
