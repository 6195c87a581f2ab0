"""Settings of the cluster. Light: imports no ray."""

from dataclasses import dataclass
from enum import StrEnum

from rlframe.utils.bounds import Seconds, check_bounds


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

    def __post_init__(self) -> None:
        check_bounds(self)
