"""Settings of the cluster. Imports no ray."""

import os
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.cluster.runtime_env import RuntimeEnvConfig
from rlframe.utils.bounds import Range, Seconds, check_bounds
from rlframe.utils.errors import SettingError

ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of a Ray cluster."""
LOCAL = "local"
"""Address that means a Ray of this run's own, as in `ray.init`."""
FLOOR_STALLS = 5.0
"""Least limit of a phase, in units of stall_warning_s, so that several warnings precede the end of a run."""


class Device(StrEnum):
    """The hardware that a rank runs on."""

    AUTO = "auto"
    """cuda if this machine has it, or a node of the joined cluster, else cpu."""
    CPU = "cpu"
    CUDA = "cuda"


class Preflight(StrEnum):
    """Ways to use the memory that is predicted before a run starts."""

    AUTO = "auto"
    """A run that cannot fit is refused."""
    OFF = "off"
    """Nothing is predicted, and no run is refused for its memory."""


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Settings of the cluster that the processes run on."""

    address: str | None = None
    """Ray cluster to join (`auto` or host:port). null joins RAY_ADDRESS if that is set, and otherwise starts Ray on
    this machine."""
    device: Device = Device.AUTO
    """The hardware that each rank runs on. On a joined cluster auto is cuda if any node declares a GPU, whatever this
    machine has."""
    device_tflops: Annotated[float, Range(above=0, maximum=10**6)] | None = None
    """Peak of a device in 1e12 operations a second, of which throughput/PHASE_mfu_fraction is a share. null means
    bfloat16 by the data sheet of a known GPU; on a CPU no share is claimed then."""
    runtime_env: RuntimeEnvConfig = field(default_factory=RuntimeEnvConfig)
    """Environment of every worker's process, in addition to that of its node."""
    colocate: bool = True
    """Whether policy ranks and engines share devices and take turns. Otherwise engines get devices of their own."""
    preflight: Preflight = Preflight.AUTO
    """Whether a run is refused before it starts if its memory, predicted as by `python -m rlframe.tools.plan`, cannot
    fit the devices of this machine. off starts it in any case."""
    stall_warning_s: Seconds = 60.0
    """Seconds without progress of a phase after which a warning is logged, and again after twice that time, and so on.
    It names the late workers, their states, collectives, last actions and stacks. The run continues."""
    phase_timeout_s: Seconds = 1800.0
    """Greatest duration in seconds of the first phase of each kind. Exceeding it names the late worker, prints its
    stack and ends the run. Later phases have a lower limit, see phase_timeout_factor."""
    phase_timeout_factor: Annotated[float, Range(above=1, maximum=1000)] = 10.0
    """Limit of a phase in units of the slowest of the last ten phases of its kind, at least 5 * stall_warning_s and at
    most phase_timeout_s."""
    start_timeout_s: Seconds = 300.0
    """Greatest duration in seconds of starting and connecting all workers of a role."""
    audit_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 20
    """Number of steps between two audits. The ranks compare the copies of trained weights (as a policy with engines
    does in each sync, and every model in each checkpoint), and compare frozen weights with those that were loaded
    (references, teachers and reward models in ranks, the base of adapters). 0 disables audits."""
    max_restarts: Annotated[int, Range(0, 10**6, note="0: the first death ends the run")] = 3
    """Greatest number of times that one program may restart its trainer ranks after the process of one has ended. They
    continue from the last complete checkpoint, or else from the start, and the engines are kept. Every death counts, so
    that a rank that always dies at the same place ends the run."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if FLOOR_STALLS * self.stall_warning_s >= self.phase_timeout_s:
            raise SettingError(
                "stall_warning_s",
                f"must be less than {1 / FLOOR_STALLS:g} of phase_timeout_s={self.phase_timeout_s:g}",
                got=f"{self.stall_warning_s:g}",
                why=f"every limit is at least {FLOOR_STALLS:g} * stall_warning_s, so "
                "phase_timeout_factor would have no effect",
                hint="lower stall_warning_s",
            )

    @property
    def joins(self) -> str | None:
        """The address of the Ray cluster that the run joins. None if it starts Ray on this machine."""
        address = self.address or os.environ.get(ADDRESS)
        return None if address == LOCAL else address or None
