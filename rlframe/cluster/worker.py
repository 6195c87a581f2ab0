"""What every actor of a worker group has in common: a log file of its own, and a process that can show its stack."""

import faulthandler
import os
import pathlib
import signal
import socket
from dataclasses import dataclass

STACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """Where a worker lives."""

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

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (pid {self.pid} on {self.host})"


class Worker:
    """Base of the actor classes. One process, one rank."""

    def __init__(self, *, role: str, rank: int, log_folder: str, num_threads: int):
        self.role, self.rank = role, rank
        self.log = pathlib.Path(log_folder) / f"{role}-{rank}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = self.log.open("a", buffering=1)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # Python prints every thread's stack into the log on this signal, also when the main thread hangs in C.
        faulthandler.enable(log)
        faulthandler.register(STACK_SIGNAL, file=log, all_threads=True)
        self.set_threads(num_threads)

    @staticmethod
    def set_threads(num_threads: int) -> None:
        """Share the cores with the other ranks of this machine."""
        import torch  # noqa: PLC0415 - the driver imports this file for its names only

        torch.set_num_threads(num_threads)

    def info(self) -> WorkerInfo:
        """Where this worker lives; the group's first call, which also waits for the constructor."""
        import ray  # noqa: PLC0415 - a worker made without Ray (tests) does not need it

        return WorkerInfo(
            role=self.role,
            rank=self.rank,
            node_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            log=str(self.log.absolute()),
        )
