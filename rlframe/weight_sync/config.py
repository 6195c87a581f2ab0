"""Settings of weight sync."""

from dataclasses import dataclass
from typing import Annotated

from rlframe.utils import registry
from rlframe.utils.bounds import Range, Seconds, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.utils.outside import is_outside
from rlframe.weight_sync.transports.base import PACKAGE


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights get from the policy to the engines, and how the arrival is watched."""

    transport: str = "auto"
    """`auto` chooses by where the processes run and what the engines can do, and logs why. Forced: `shm` (CPU, one
    host), `cuda_ipc` (GPUs of one host), `nccl` (between hosts; gloo for CPU), `reload` (whole tensors through the
    engine's own loader). One that cannot work stops the run with the reason."""
    bucket_bytes: Annotated[int, Range(1024, 1 << 40)] = 1 << 30
    """Staging memory of a reload on each engine rank. A tensor larger than this has a bucket to itself."""
    chunk_bytes: Annotated[int, Range(1024, 1 << 40)] = 256 << 20
    """Bound of the packed buffers of `nccl` on each rank, which has two of them."""
    timeout_s: Seconds = 600.0
    """How long a rank waits for its peers in one sync, in seconds, before the sync fails."""
    audit_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 10
    """Every so many steps, once a batch has been sampled, trainer and engines digest their memory anew, which must
    still hold what the last sync proved; 0 never."""
    probe_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 100
    """Every so many steps, and once at the start, the engines' logprobs of fixed prompts are compared with the
    trainer's; 0 never."""
    probe_limit_nats: Annotated[float, Range(above=0, maximum=100)] = 0.5
    """Mean absolute difference of those logprobs, in nats, from which the run stops."""

    def __post_init__(self) -> None:
        check_bounds(self)
        known = ["auto", *registry.names(PACKAGE), "reload"]
        if self.transport not in known and not is_outside(self.transport):
            hint = "its name is now reload" if self.transport == "stream" else ""
            raise SettingError("transport", f"must be one of {', '.join(known)}", got=repr(self.transport), hint=hint)
