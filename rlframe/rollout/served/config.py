"""ServedConfig: the settings common to engines that run in processes of their own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from rlframe.models.families.base import Architecture
from rlframe.models.quantized.blocks import SIZE, EngineFormat
from rlframe.models.shards import uneven_blocks
from rlframe.rollout.base.config import CacheFormat, RolloutConfig
from rlframe.rollout.base.speculative import SpeculativeMethod
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault


@dataclass(kw_only=True, slots=True)
class ServedConfig(RolloutConfig):
    """Settings of vLLM and of SGLang."""

    keeps_cache: ClassVar[bool] = True
    """See RolloutConfig."""
    own_options: ClassVar[frozenset[str]] = frozenset()
    """Engine arguments that users must not set: they have a setting of their own, or the engine's correctness depends
    on them."""
    refused_options: ClassVar[Mapping[str, str]] = {}
    """Engine arguments that nothing sets, because rlframe would be wrong with them, each with the reason."""

    tp: Annotated[int, Range(1, 1024)] = 1
    """Number of devices over which each engine splits the model."""
    expert_parallel: bool = False
    """Whether each of the tp devices holds whole experts, instead of a tp-th of every expert."""
    gpu_memory_utilization: Annotated[float, Range(above=0, maximum=1)] = 0.5
    """Fraction of the device's memory for weights and key-value cache (with vLLM also activations; SGLang calls it
    mem_fraction_static). It must be free when the engine starts, which is after the policy. An engine with devices of
    its own can use 0.9 with vLLM and 0.85 with SGLang. No effect on CPU, and with kv_cache_gb."""
    kv_cache_gb: Annotated[float, Range(above=0, maximum=100_000)] | None = None
    """Size of the key-value cache on each device, in GB. null: what gpu_memory_utilization leaves, on a CPU 1.07. With
    a size the engine measures no memory: it starts while the policy does, and other runs may use the device."""
    quantization: EngineFormat = EngineFormat.NONE
    """Number format of the matrices in layers. none: that of dtype. fp8_block: the trainer quantises them for each
    weight sync, in blocks of 128 x 128 with float32 scales, and proves the engine's bytes against that; products
    quantise activations too, so that logprobs differ more from the trainer's and a correction is due.
    fp8_block_powers_of_2: with scales that are powers of two, the weights with which train.fp8.recipe=blockwise
    trains."""
    kv_cache_dtype: CacheFormat = CacheFormat.AUTO
    """Number format of the key-value cache. auto: that of activations. fp8: half the bytes of bfloat16, so twice the
    sequences at once, and logprobs that differ more from the trainer's."""
    max_model_len: Annotated[int, Range(2, 1 << 24)] | None = None
    """Greatest number of tokens of a sequence, prompt and response. null means the model's positions. A lower limit may
    save cache memory."""
    max_num_seqs: Annotated[int, Range(1, 1 << 16)] = 256
    """Greatest number of sequences decoded at once. Further requests wait."""
    enforce_eager: bool = False
    """Whether to run without compilation and CUDA graphs: starts faster, decodes slower. No effect with SGLang on a
    CPU."""
    sleep_level: Annotated[int, Range(0, 2)] = 2
    """Memory that engines free while the policy works on their devices. 2: the key-value cache and the weights, because
    the next weight sync brings new ones. 1: the cache, and the weights move to host memory, which takes as much host
    memory and a copy in both directions; the engine is then usable without a sync. 0: none, which is the fastest where
    the device has memory for both. No effect on CPU."""
    enable_prefix_caching: bool = True
    """Whether equal prompt beginnings, such as those of a group, share their keys and values."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, under the engine's own names. Those that another setting sets are refused, and
    those with which samples or weight sync would be wrong."""

    @property
    def prepares_apart(self) -> bool:
        """Returns whether a process of its own prepares the steps of a single device that the engine's decides on."""
        return False

    def __post_init__(self) -> None:
        # dataclass(slots=True) creates a new class, which breaks zero-argument super().
        RolloutConfig.__post_init__(self)
        if self.expert_parallel and self.tp == 1:
            raise SettingError("expert_parallel", "needs tp above 1 (it splits the experts over the tp devices)")
        default = next(each.default for each in fields(self) if each.name == "gpu_memory_utilization")
        if self.kv_cache_gb is not None and self.gpu_memory_utilization != default:
            raise SettingError(
                "kv_cache_gb",
                "and gpu_memory_utilization both decide the size of the cache",
                got=self.kv_cache_gb,
                hint="choose one (~rollout.gpu_memory_utilization removes that of a recipe)",
            )
        if own := sorted(self.own_options & self.engine_options.keys()):
            raise SettingError("engine_options", f"must not hold {own[0]}", why="another setting of rollout sets it")
        if refused := sorted(self.refused_options.keys() & self.engine_options.keys()):
            raise SettingError("engine_options", f"must not hold {refused[0]}", why=self.refused_options[refused[0]])

    @property
    def engine_format(self) -> EngineFormat:
        """See RolloutConfig."""
        return self.quantization

    @property
    def cache_format(self) -> CacheFormat:
        """See RolloutConfig."""
        return self.kv_cache_dtype

    @property
    def devices_per_engine(self) -> int:
        """Number of devices of one engine, all on one node."""
        return self.tp

    @property
    def sleeps(self) -> bool:
        """See RolloutConfig."""
        return self.sleep_level > 0

    @property
    def measures_memory(self) -> bool:
        """See RolloutConfig."""
        return self.kv_cache_gb is None

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the key-value cache on each device. None means what gpu_memory_utilization leaves."""
        return None if self.kv_cache_gb is None else int(self.kv_cache_gb * 1e9)

    @property
    def sequence_tokens(self) -> int | None:
        """Greatest number of tokens of a sequence, prompt and response. None means the model's positions."""
        return self.max_model_len

    def faults(self, architecture: Architecture) -> Iterator[Fault]:
        """See RolloutConfig. Subclasses add the rules by which their engine splits a model."""
        if self.quantization is not EngineFormat.NONE:
            expert_tp = 1 if self.expert_parallel else self.tp
            for words, size in uneven_blocks(architecture, tp=self.tp, expert_tp=expert_tp):
                yield Fault(
                    "rollout.quantization",
                    f"needs {words} to be a multiple of {SIZE}, got {size} of {architecture.model_type}",
                    got=self.quantization,
                    hint="use none, or a smaller rollout.tp" if self.tp > 1 else "use none",
                    stated=True,
                )
        if self.max_model_len is not None and self.max_model_len > architecture.max_positions:
            yield Fault(
                "rollout.max_model_len",
                f"must not exceed the model's {architecture.max_positions} positions",
                got=self.max_model_len,
                stated=True,
            )

    def speculative_faults(self, *, cuda: bool, shares_devices: bool, synced: bool) -> Iterator[Fault]:
        """See RolloutConfig."""
        assert self.speculative is not None, "rules about it are asked for if it is set"
        if not synced and cuda and shares_devices and self.sleep_level == 2:
            heads = self.speculative.method is SpeculativeMethod.MTP
            yield Fault(
                "rollout.sleep_level",
                f"must be 0 or 1 with rollout.speculative.method={self.speculative.method}"
                + (" and train.mtp.mode=drop" if heads else ""),
                got=self.sleep_level,
                why="2 drops the weights of drafts too, and no weight sync brings them back",
                hint="use 1, which keeps them in host memory"
                + (", or train.mtp.mode=keep, with which every sync brings them" if heads else ""),
            )
