"""Settings of the cluster. Light: imports no ray."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, Seconds, check_bounds
from rlframe.utils.errors import SettingError

FLOOR_STALLS = 5.0
"""The least limit of a phase, in units of stall_warning_s: several warnings come before any end."""


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
    stall_warning_s: Seconds = 60.0
    """When nothing was seen of a phase for so long, a warning names the workers that are late, in which state, in which
    collective, what they did last and their stacks; again after twice that time, and so on. The run goes on."""
    phase_timeout_s: Seconds = 1800.0
    """The first phase of its kind that takes longer names the worker it waits for, prints its stack and ends the run.
    Later ones have less, see phase_timeout_factor."""
    phase_timeout_factor: Annotated[float, Range(above=1, maximum=1000)] = 10.0
    """Limit of a phase in units of the slowest of the last ten of its kind, at least 5 * stall_warning_s and at most
    phase_timeout_s."""
    start_timeout_s: Seconds = 300.0
    """Limit for starting and connecting all workers of a role."""
    audit_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 20
    """Every so many steps the ranks compare their copies of what is trained, as a policy with engines does in each sync
    and every model in each checkpoint, and what is frozen with what was loaded (references, teachers and reward models
    in ranks, the base of adapters); 0 never."""
    max_restarts: Annotated[int, Range(0, 10**6, note="0: the first death ends the run")] = 3
    """How often one program may start its trainer ranks anew after the process of one has ended, from the last complete
    checkpoint or else from the start, with the engines kept. Every death counts, so
    that a rank that dies at the same place each time ends the run too."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if FLOOR_STALLS * self.stall_warning_s >= self.phase_timeout_s:
            raise SettingError(
                "stall_warning_s",
                f"must be under {1 / FLOOR_STALLS:g} of phase_timeout_s={self.phase_timeout_s:g}",
                got=f"{self.stall_warning_s:g}",
                why=f"no limit is less than {FLOOR_STALLS:g} warnings, so phase_timeout_factor would have no effect",
                hint="lower stall_warning_s",
            )
