"""Settings of weight sync."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils import registry
from rlframe.utils.bounds import Range, Seconds, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.outside import is_outside
from rlframe.weight_sync.transports import PACKAGE


class HoldIn(StrEnum):
    """Place of a copy of the published weights that training does not change."""

    NONE = "none"
    HOST = "host"


class LoraSync(StrEnum):
    """Form in which engines receive a policy with train.lora."""

    MERGED = "merged"
    ADAPTER = "adapter"


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """Settings of the transfer of weights from the policy to the engines, and of its checks."""

    transport: str = "auto"
    """Transport of the weights. `auto` chooses by the locations of the processes and the abilities of the engines, and
    logs the reason. `shm` is for CPUs of one host, `cuda_ipc` for GPUs of one host, `nccl` between hosts (gloo for
    CPU), `reload` sends whole tensors through the engine's own loader. One that is unavailable ends the run with the
    reason."""
    lora: LoraSync = LoraSync.MERGED
    """Form in which engines receive a policy with train.lora. merged: the trainer adds B A to the weights, and all
    weights are sent. adapter: engines compute with the adapters themselves, the base is proved once, and only A and B
    are sent: less than a hundredth of the bytes, and logprobs closer to the trainer's in bfloat16, but slower
    sampling. For vLLM, dense models, and matrices of attention and MLP."""
    bucket_bytes: Annotated[int, Range(1024, 1 << 40)] = 1 << 30
    """Bytes of staging memory of a reload on each engine rank. A larger tensor has a bucket of its own."""
    chunk_bytes: Annotated[int, Range(1024, 1 << 40)] = 256 << 20
    """Bound in bytes of the packed buffers of `nccl` on each rank, which has two of them. A message has 16 bytes at
    least."""
    timeout_s: Seconds = 600.0
    """Greatest time in seconds that a rank waits for its peers in one sync, before the sync fails."""
    hold: HoldIn = HoldIn.NONE
    """Place where the weights of the last sync are held while the policy trains on. An engine that dies meanwhile is
    restarted at once and receives them from there, with proof; otherwise it waits for the end of the step. `host`
    copies them into host memory of the trainer's ranks after each sync: the bytes of one copy of the weights, and the
    time of writing them once. It is for engines on the trainer's host, which sample while the policy trains
    (loop.max_policy_lag above 0 and cluster.colocate=false)."""
    audit_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 10
    """Number of steps between two audits. After a batch has been sampled, trainer and engines digest their memory
    again, and compare it with the last sync. 0 disables audits."""
    probe_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 100
    """Number of steps between two probes, which also run once at the start. A probe compares the engines' logprobs of
    fixed prompts with the trainer's. 0 disables probes."""
    probe_limit_nats: Annotated[float, Range(above=0, maximum=100)] = 0.5
    """Mean absolute difference of those logprobs, in nats, at which the run stops."""

    def __post_init__(self) -> None:
        check_bounds(self)
        known = ["auto", *registry.names(PACKAGE), "reload"]
        if self.transport not in known and not is_outside(self.transport):
            renamed = self.transport == "stream"
            hint = "it was renamed to reload" if renamed else did_you_mean(self.transport, known)
            raise SettingError("transport", f"must be one of {', '.join(known)}", got=repr(self.transport), hint=hint)
