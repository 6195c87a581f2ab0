"""Settings of SGLang."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlframe.models.families.base import Architecture
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import CacheFormat
from rlframe.rollout.served.config import ServedConfig
from rlframe.rollout.sglang import layout
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault

OWN_OPTIONS = frozenset(
    {
        "attention_backend",
        "context_length",
        "disable_cuda_graph",
        "disable_radix_cache",
        "dtype",
        "enable_fp32_lm_head",
        "enable_memory_saver",
        "enable_return_routed_experts",
        "enable_weights_cpu_backup",
        "ep_size",
        "kv_cache_dtype",
        "load_format",
        "max_running_requests",
        "max_total_tokens",
        "mem_fraction_static",
        "model_loader_extra_config",
        "model_path",
        "quantization",
        "sampling_backend",
        "sampling_defaults",
        "skip_tokenizer_init",
        "speculative_algorithm",
        "tp_size",
        "trust_remote_code",
    }
)
"""Engine arguments that users must not set: they have a setting of their own, or the engine's correctness depends on
them."""
STALE = "keys and values outside of the engine's own cache outlive a weight sync"
RANKS = "an engine has rollout.tp ranks, to each of which weight sync speaks; rollout.num_engines starts more engines"
REFUSED_OPTIONS = {
    "disaggregation_mode": "an engine computes prompts and responses",
    "dp_size": RANKS,
    "enable_eplb": "SGLang would move experts to other memory than weight sync writes them to",
    "enable_flexkv": STALE,
    "enable_lmcache": STALE,
    # Emptying the cache does not empty it (0.5.23, `UnifiedRadixCache.reset`); a call of its own does.
    "hicache_storage_backend": STALE,
    "incremental_streaming_output": "an output holds the whole response so far, whose end is looked for in it",
    "max_queued_requests": "requests of a whole batch wait in SGLang's queue, which would refuse them",
    "pp_size": RANKS,
    "preferred_sampling_params": "logprobs are those of the settings of rollout, by which alone tokens are drawn",
}
"""Engine arguments with which rlframe would be wrong, each with the reason."""


@dataclass(kw_only=True, slots=True)
class SglangConfig(ServedConfig):
    """Settings of SGLang."""

    own_options = OWN_OPTIONS
    refused_options = REFUSED_OPTIONS
    # SGLang (0.5.17 to 0.5.23) takes the likeliest token below that.
    temperatures = (1e-6, math.inf)

    name: str = "sglang"
    """The name of this folder."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if self.gpu_memory_utilization == 1:
            raise SettingError("gpu_memory_utilization", "must be below 1 for SGLang", got=self.gpu_memory_utilization)

    @property
    def stop_loses_routes(self) -> bool:
        """See RolloutConfig, and `route_faults`."""
        return True

    def float32_logits_faults(self) -> Iterator[Fault]:
        """Yields nothing: SGLang has an argument for it. See RolloutConfig."""
        yield from ()

    def speculative_faults(self, *, cuda: bool, shares_devices: bool, synced: bool) -> Iterator[Fault]:  # noqa: ARG002 - the same on all
        """See RolloutConfig."""
        # SGLang 0.5.23: `eagle_sample` and `_verify_uses_greedy` of srt/speculative/eagle_utils.py.
        why = (
            "SGLang draws the tokens after a draft by kernels of its own, without min_tokens and a request's seed as "
            "rlframe draws them"
            if cuda
            else "SGLang on a CPU takes the likeliest token after a draft, whatever the temperature"
        )
        yield Fault(
            "rollout.speculative",
            "must be null with rollout.name=sglang",
            got="a section",
            why=why,
            hint="use rollout=vllm, or remove it",
        )

    def quantization_faults(self, architecture: Architecture, *, cuda: bool) -> Iterator[Fault]:
        """See RolloutConfig."""
        if self.engine_format is not EngineFormat.NONE and not cuda:
            yield Fault(
                "rollout.quantization",
                f"must be none for {architecture.model_type} on a CPU with rollout.name=sglang",
                got=self.engine_format,
                why="SGLang repacks weights in FP8 there, so that they cannot be written in place",
            )
        if self.cache_format is CacheFormat.AUTO:
            return
        key, model = "rollout.kv_cache_dtype", architecture.model_type
        if not cuda:
            rule = f"must be auto for {model} on a CPU with rollout.name=sglang"
            yield Fault(key, rule, got=self.cache_format, why="SGLang has kernels for it on GPUs only")
        elif architecture.latent or architecture.sinks or architecture.gated_delta_net:
            why = "SGLang's kernels for latent attention, sinks and gated delta nets have not been compared with it"
            yield Fault(
                key,
                f"must be auto for {model} with rollout.name=sglang",
                got=self.cache_format,
                why=why,
                hint="or use rollout=vllm",
            )

    def faults(self, architecture: Architecture) -> Iterator[Fault]:
        """See RolloutConfig."""
        yield from layout.faults(architecture, tp=self.tp, ep=self.expert_parallel)
        yield from ServedConfig.faults(self, architecture)

    def route_faults(self, *, cuda: bool) -> Iterator[Fault]:  # noqa: ARG002 - the same on all
        """See RolloutConfig. Stop strings are matched here and end in an abort, but SGLang returns routed experts only
        for requests that finish on their own."""
        if self.stop:
            yield Fault(
                "rollout.stop",
                "must be empty if rollout.name=sglang is to return routed experts: it returns them only for responses "
                "that end by a stop token or by their length",
                got=self.stop,
            )
        if self.engine_options.get("enable_hierarchical_cache"):
            yield Fault(
                "rollout.engine_options.enable_hierarchical_cache",
                "must not be set if rollout.name=sglang is to return routed experts",
                why="keys and values that come back from host memory lie in another place, which has the experts of "
                "others",
                hint="remove it",
            )
