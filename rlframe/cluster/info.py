"""Where the processes of a run are."""

import pathlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """Says where a worker lives."""

    role: str
    rank: int
    node_id: str
    """Ray's id of the node."""
    host: str
    address: str
    """IP address other nodes reach it at."""
    pid: int
    log: str
    """Path of its log on its node."""

    @property
    def path(self) -> pathlib.Path:
        """Returns the path of its log."""
        return pathlib.Path(self.log)

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (pid {self.pid} on {self.host})"
