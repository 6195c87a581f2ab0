"""Settings of vLLM."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from rlframe.cluster.profiling.config import ProfileConfig, Tool
from rlframe.models.families.base import Architecture
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import CacheFormat, EngineDtype
from rlframe.rollout.served.config import ServedConfig
from rlframe.rollout.vllm import layout
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault

OWN_OPTIONS = frozenset(
    {
        "distributed_executor_backend",
        "dtype",
        "enable_expert_parallel",
        "enable_lora",
        "enable_prefix_caching",
        "enable_return_routed_experts",
        "enable_sleep_mode",
        "enforce_eager",
        "generation_config",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "load_format",
        "logprobs_mode",
        "max_logprobs",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_seqs",
        "model",
        "model_loader_extra_config",
        "moe_backend",
        "quantization",
        "skip_tokenizer_init",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "speculative_config",
        "stream_interval",
        "tensor_parallel_size",
        "trust_remote_code",
        "worker_extension_cls",
    }
)
"""Engine arguments that users must not set: they have a setting of their own, or the engine's correctness depends on
them."""
STALE = "keys and values outside of the engine's own cache outlive a weight sync, and have no experts for router replay"
RANKS = "an engine has rollout.tp ranks, to each of which weight sync speaks; rollout.num_engines starts more engines"
QUEUE = "requests of a whole batch wait in vLLM's queue, which would refuse them"
REFUSED_OPTIONS = {
    "data_parallel_size": RANKS,
    "enable_eplb": "vLLM would move experts to other memory than weight sync writes them to",
    # Not every connector can be emptied, and those that cannot say nothing of it (vLLM 0.32,
    # `KVConnectorBase_V1.reset_cache`).
    "kv_offloading_size": STALE,
    "kv_transfer_config": STALE,
    "max_num_queued_reqs": QUEUE,
    "max_num_queued_tokens": QUEUE,
    "pipeline_parallel_size": RANKS,
    "prefill_context_parallel_size": RANKS,
}
"""Engine arguments with which rlframe would be wrong, each with the reason."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules whose adapters rlframe writes into vLLM."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of the memory that vLLM keeps for an adapter (`MaxLoRARanks` of vLLM 0.32; 0.26 has them too)."""
PROFILER_CONFIG = "profiler_config"
"""The engine argument about vLLM's own profiler."""
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of heads for which vLLM's attention on a CPU has kernels: those that vLLM 0.32 names and does not check, and
48, which runs."""
COMPILATION_CONFIG = "compilation_config"
"""The engine argument about Inductor and CUDA graphs."""


def _head_faults(architecture: Architecture) -> Iterator[Fault]:
    """Yields a fault if the model's heads have a width for which vLLM's attention on a CPU has no kernel."""
    model, size = architecture.model_type, architecture.head_dim
    if architecture.latent is None and size not in CPU_HEAD_SIZES:
        yield Fault(
            "rollout.name",
            f"must be another engine for {model} with heads of {size} numbers on a CPU, where vLLM's attention has no "
            "kernel for them",
            got="vllm",
            hint=f"use rollout.name=transformers, or one of the head sizes {', '.join(map(str, CPU_HEAD_SIZES))}",
        )


def slot_rank(rank: int) -> int:
    """Returns the rank of the memory in which vLLM keeps an adapter of `rank`."""
    return next(each for each in SLOT_RANKS if each >= rank)


def has_tiles() -> bool:
    """Returns whether this CPU has AMX, which vLLM's products in FP8 need there."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_tile" in info.read_text()


class MoeBackend(StrEnum):
    """Kernels of the experts on CUDA."""

    TRITON = "triton"
    """Triton kernels. The weights stay as loaded, so weight sync writes into them directly."""
    AUTO = "auto"
    """vLLM's choice. It may repack the weights. If that changes their shape they are synced through vLLM's reload;
    otherwise calibration stops the run and names weight_sync.transport=reload."""
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    """FlashInfer's CUTLASS kernels. They repack the weights."""
    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    """FlashInfer's TensorRT-LLM kernels. They repack the weights."""


@dataclass(kw_only=True, slots=True)
class VllmConfig(ServedConfig):
    """Settings of vLLM."""

    own_options = OWN_OPTIONS
    refused_options = REFUSED_OPTIONS
    # vLLM (0.26 to 0.33) samples at 0.01 below that, and refuses others.
    temperatures = (0.01, 2.0)

    name: str = "vllm"
    """The name of this folder."""
    moe_backend: MoeBackend = MoeBackend.TRITON
    """Kernels of the experts on CUDA. The CPU has one implementation only."""
    compile: bool = False
    """Whether Inductor compiles the model, once for a machine (vLLM keeps the result in ~/.cache/vllm), which takes the
    first start ten seconds or more. No model that was measured decoded faster with it by more than runs differ
    (docs/engines.md). Without it CUDA graphs hold decoding alone; entries of engine_options.compilation_config, such as
    cudagraph_capture_sizes, are added to that. No effect with enforce_eager."""

    share_prompts: bool | None = None
    """Whether a decode step reads the keys and values that responses share, such as those of their prompt, once for all
    of them (CUDA, where vLLM chooses FlashAttention). Needs enable_prefix_caching. Same but for rounding. null: on GPUs
    of compute capability 9.0 (H100, H200), where it was measured, unless another setting excludes it."""

    worker_process: bool | None = None
    """Whether the worker of a single device has a process of its own, as those of several always have. vLLM then
    decides what comes next while the worker prepares the step before it. null: on a GPU."""

    @property
    def reads_shared_once(self) -> bool:
        """See RolloutConfig."""
        return self.share_prompts is not False and not self._reads_all()

    @property
    def prepares_apart(self) -> bool:
        """See ServedConfig. Not asked on a CPU."""
        return self.worker_process is not False

    def num_worker_processes(self, *, cuda: bool) -> int:
        """Returns the number of processes beside that of vLLM's core."""
        has_own = cuda if self.worker_process is None else self.worker_process
        return self.tp if self.tp > 1 or has_own else 0

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if self.share_prompts and (other := self._reads_all()):
            raise SettingError("share_prompts", f"has no effect with {other}; remove it", got="true")
        own = self.engine_options.get(COMPILATION_CONFIG, {})
        if not self.compile and isinstance(own, Mapping) and (mode := own.get("mode", 0)) not in (0, "NONE"):
            raise SettingError(
                "compile",
                f"false contradicts engine_options.{COMPILATION_CONFIG}.mode={mode}",
                got=False,
                hint="remove the mode, or set compile=true",
            )

    def _reads_all(self) -> str | None:
        """Returns a setting with which every decode step reads shared tokens for each response."""
        if not self.enable_prefix_caching:
            return "enable_prefix_caching=false"
        if self.speculative is not None:
            return "speculative"
        return None if self.kv_cache_dtype is CacheFormat.AUTO else f"kv_cache_dtype={self.kv_cache_dtype}"

    def faults(self, architecture: Architecture) -> Iterator[Fault]:
        """See RolloutConfig."""
        yield from layout.faults(architecture, tp=self.tp, ep=self.expert_parallel)
        yield from ServedConfig.faults(self, architecture)

    def cpu_faults(self, architecture: Architecture, *, trained: str) -> Iterator[Fault]:
        """See RolloutConfig. Each would end an engine of vLLM 0.32 after it has started: `expert_parallel` by a
        segmentation fault at its first request, the others by an assertion or another error of vLLM."""
        yield from _head_faults(architecture)
        if self.expert_parallel:
            yield Fault(
                "rollout.expert_parallel",
                "must be false on a CPU",
                got="true",
                why="vLLM's kernels for experts on a CPU leave out which experts a rank has, and its workers die",
            )
        if architecture.gated_delta_net is None:
            return
        if (dtype := self.number_format(trained)) is not EngineDtype.BFLOAT16:
            yield Fault(
                "rollout.dtype",
                f"must be bfloat16 for {architecture.model_type} on a CPU, where vLLM has no other kernel for gated "
                "delta nets",
                got=dtype,
                hint="or use rollout.name=transformers",
            )
        if self.enable_prefix_caching:
            yield Fault(
                "rollout.enable_prefix_caching",
                f"must be false for {architecture.model_type} on a CPU, where vLLM cannot keep the states of gated "
                "delta nets",
                got="true",
            )

    def adapter_faults(self, architecture: Architecture, tensors: Iterable[str], *, rank: int) -> Iterator[Fault]:
        """See RolloutConfig."""
        key = "weight_sync.lora"
        if architecture.num_experts:
            yield Fault(
                key,
                f"must be merged for {architecture.model_type}, which has experts",
                got="adapter",
                why="with LoRA vLLM runs experts by other kernels, whose memory rlframe does not write",
            )
        elif other := [name for name in tensors if name.split(".")[-2] not in ADAPTED]:
            yield Fault(
                key,
                f"must be merged with adapters of {other[0]}",
                got="adapter",
                why=f"rlframe writes those of {', '.join(ADAPTED)} into vLLM",
                hint="or leave it out by train.lora.exclude_modules",
            )
        if rank > SLOT_RANKS[-1]:
            yield Fault(
                "train.lora.rank",
                f"must be at most {SLOT_RANKS[-1]} with {key}=adapter, which is vLLM's limit",
                got=rank,
                hint="or use merged",
            )

    def quantization_faults(self, architecture: Architecture, *, cuda: bool) -> Iterator[Fault]:
        """See RolloutConfig."""
        if architecture.latent and self.cache_format is not CacheFormat.AUTO:
            why = "vLLM would choose other kernels for latent attention, which nobody has compared"
            yield Fault(
                "rollout.kv_cache_dtype", f"must be auto for {architecture.model_type}", got=self.cache_format, why=why
            )
        if self.engine_format is EngineFormat.NONE:
            return
        key, got = "rollout.quantization", self.engine_format
        if architecture.num_experts and not cuda:
            why = "vLLM repacks experts in FP8 there, so that they cannot be written in place"
            yield Fault(
                key, f"must be none for {architecture.model_type} on a CPU, which has experts", got=got, why=why
            )
        elif not cuda and not has_tiles():
            yield Fault(key, "must be none on a CPU without AMX, where vLLM has no kernels for it", got=got)
        if architecture.num_experts and cuda and self.moe_backend is not MoeBackend.TRITON:
            why = "other kernels repack experts in FP8, so that they cannot be written in place"
            yield Fault("rollout.moe_backend", f"must be triton with {key}={got}", got=self.moe_backend, why=why)

    def profile_faults(self, profile: ProfileConfig) -> Iterator[Fault]:
        """See RolloutConfig."""
        if profile.tool is Tool.MEMORY:
            yield Fault(
                "profile.tool",
                "must be torch or nsys for engines of vLLM, which record no snapshots of memory",
                got=profile.tool,
                hint="or leave engines out of profile.roles",
            )
        if PROFILER_CONFIG in self.engine_options:
            yield Fault(
                f"rollout.engine_options.{PROFILER_CONFIG}",
                "must not be set where profile.steps profiles engines, which sets it",
                hint="remove it, or leave engines out of profile.roles",
            )

    def profiled(self, profile: ProfileConfig, folder: str) -> "VllmConfig":
        """See RolloutConfig."""
        options: dict[str, object] = {"profiler": "cuda"}
        if profile.tool is Tool.TORCH:
            # Without the front end: it is in the actor's process, which samples nothing.
            options = {
                "profiler": "torch",
                "torch_profiler_dir": folder,
                "torch_profiler_with_stack": profile.stacks,
                "ignore_frontend": True,
            }
        return replace(self, engine_options=self.engine_options | {PROFILER_CONFIG: options})

    def float32_logits_faults(self) -> Iterator[Fault]:
        """See RolloutConfig."""
        if self.speculative is not None:
            yield Fault(
                "model.float32_logits",
                "must be false with rollout.speculative",
                got="true",
                why="nobody has shown that vLLM checks drafts with the same logits",
            )

    def exact_faults(self, *, cuda: bool) -> Iterator[Fault]:
        """See RolloutConfig."""
        yield Fault(
            "rollout.logprobs",
            "must be sampled with rollout.name=vllm",
            got=self.logprobs,
            why="VLLM_BATCH_INVARIANT=1 makes vLLM agree with itself in any batch; to agree with it, the trainer would "
            "need its kernels, also in the backward pass, which Megatron-Core does not have",
            hint="use rollout.name=transformers on a CPU, or an algorithm's correction",
        )

    def route_faults(self, *, cuda: bool) -> Iterator[Fault]:
        """See RolloutConfig."""
        if cuda and self.moe_backend is not MoeBackend.TRITON:
            yield Fault(
                "rollout.moe_backend",
                "must be triton if vLLM is to return routed experts (kernels that route internally do not)",
                got=self.moe_backend,
            )
