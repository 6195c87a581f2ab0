"""Settings of weight sync."""

from dataclasses import dataclass

from rlframe.utils import registry
from rlframe.weight_sync.transports.base import PACKAGE


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights get from the policy to the engines, and how the arrival is watched."""

    transport: str = "auto"
    """`auto` chooses by where the processes run and what the engines can do, and logs why. Forced: `shm` (CPU, one
    host), `cuda_ipc` (GPUs of one host), `nccl` (between hosts; gloo for CPU), `stream` (whole tensors through the
    engine's own loader). One that cannot work stops the run with the reason."""
    bucket_bytes: int = 1 << 30
    """Staging memory of a stream on each engine rank. A tensor larger than this has a bucket to itself."""
    chunk_bytes: int = 256 << 20
    """Bound of the packed buffers of `nccl` on each rank, which has two of them."""
    timeout_s: float = 600.0
    """How long a rank waits for its peers in one sync, in seconds, before the sync fails."""
    audit_every_steps: int = 1
    """Every so many steps, once a batch has been sampled, trainer and engines digest their memory anew, which must
    still hold what the last sync proved; 0 never."""
    probe_every_steps: int = 100
    """Every so many steps, and once at the start, the engines' logprobs of fixed prompts are compared with the
    trainer's; 0 never."""
    probe_limit_nats: float = 0.5
    """Mean absolute difference of those logprobs, in nats, from which the run stops."""

    def __post_init__(self) -> None:
        known = ["auto", *registry.names(PACKAGE), "stream"]
        if self.transport not in known:
            raise ValueError(f"transport must be one of {', '.join(known)}, got {self.transport!r}")
        for field in ("bucket_bytes", "chunk_bytes"):
            if getattr(self, field) < 1024:
                raise ValueError(f"{field} must be at least 1024, got {getattr(self, field)}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")
        for field in ("audit_every_steps", "probe_every_steps"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be at least 0, got {getattr(self, field)}")
        if not self.probe_limit_nats > 0:
            raise ValueError(f"probe_limit_nats must be above 0, got {self.probe_limit_nats}")
