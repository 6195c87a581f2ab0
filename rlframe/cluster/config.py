"""Settings of the cluster. Light: imports no ray."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, Seconds, check_bounds


class Device(StrEnum):
    """What a rank runs on."""

    AUTO = "auto"
    """cuda when this machine has it, else cpu."""
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Where the processes run."""

    address: str | None = None
    """Ray cluster to join (`auto` or host:port); null joins RAY_ADDRESS if set, else starts Ray on this machine."""
    device: Device = Device.AUTO
    """What each rank runs on."""
    colocate: bool = True
    """true: policy ranks and engines share devices and take turns. false: engines get devices of their own."""
    phase_timeout_s: Seconds = 1800.0
    """A phase that takes longer names the worker it waits for, prints its stack and ends the run."""
    start_timeout_s: Seconds = 300.0
    """Limit for starting and connecting all workers of a role."""
    max_restarts: Annotated[int, Range(0, 10**6, note="0: the first death ends the run")] = 3
    """How often one program may start its trainer ranks anew after the process of one has ended, from the last complete
    checkpoint or else from the start, with the engines kept. Every death counts, so
    that a rank that dies at the same place each time ends the run too."""

    def __post_init__(self) -> None:
        check_bounds(self)
