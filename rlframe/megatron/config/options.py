"""How a step is computed, sent and remembered: settings that should not change what is learned, and those of experts.

Imports neither torch nor megatron. `training_fields` turns them into Megatron's own fields.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""What Megatron-Core 0.16 can recompute selectively."""
MODULES_OF_EXPERTS = frozenset({"moe", "moe_act", "shared_experts"})
"""Those of them that a dense model does not have."""


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass instead of kept."""

    NONE = "none"
    FULL = "full"
    """Whole layers."""
    SELECTIVE = "selective"
    """The named modules of every layer."""


class RecomputeMethod(StrEnum):
    """How the layers of a pipeline stage are cut for recompute=full."""

    UNIFORM = "uniform"
    """Groups of recompute_layers layers, each remembered by its input."""
    BLOCK = "block"
    """The first recompute_layers layers one by one; the others keep their activations."""


class Attention(StrEnum):
    """Transformer Engine's attention backend."""

    AUTO = "auto"
    FLASH = "flash"
    """Needs the package flash-attn."""
    FUSED = "fused"
    """cuDNN."""
    UNFUSED = "unfused"


@dataclass(kw_only=True, slots=True)
class KernelConfig:
    """CUDA only: which operations are one kernel. On a CPU each is as fast as it gets."""

    attention: Attention = Attention.AUTO
    """Backend of attention; auto takes Transformer Engine's choice (cuDNN on Hopper)."""
    rope_fusion: bool = True
    """Rotary embedding as one kernel."""
    activation_fusion: bool = True
    """SwiGLU as one kernel: nothing between the two matrix products is kept but its input."""
    permute_fusion: bool = True
    """Sorting tokens by expert as one kernel."""
    cutlass_experts: bool = True
    """The products of all experts as one CUTLASS kernel, not one cuBLAS product each: 1.5 to 1.7 times the tokens a
    second on layers of Qwen3-30B-A3B, which otherwise wait for launches. Transformer Engine has it for bfloat16 without
    biases on Hopper, where sizes are multiples of 128; the rest, and weights' gradients, remain cuBLAS's."""
    gradient_accumulation_fusion: bool = True
    """Matrix products of Transformer Engine's layers add to the gradient buffer themselves. The embedding and the
    output layer are Megatron's own and would need APEX for it."""


class Fp8Recipe(StrEnum):
    """How scales of 8-bit floats are found."""

    OFF = "off"
    DELAYED = "delayed"
    """One scale a tensor, from past maxima."""
    TENSORWISE = "tensorwise"
    """One scale a tensor, from its own maximum."""
    BLOCKWISE = "blockwise"
    """One scale a block of 128 (128 x 128 in weights), as DeepSeek-V3; Hopper."""


class Fp8Format(StrEnum):
    """Bits of an 8-bit float."""

    E4M3 = "e4m3"
    """4 of exponent, everywhere."""
    HYBRID = "hybrid"
    """e4m3 forward, e5m2 for gradients."""


@dataclass(kw_only=True, slots=True)
class Fp8Config:
    """Matrix products in 8-bit floats (CUDA, bfloat16 elsewhere). Engines that sample in bfloat16 then differ more."""

    recipe: Fp8Recipe = Fp8Recipe.OFF
    """How scales are found; off computes in `dtype`."""
    format: Fp8Format = Fp8Format.HYBRID
    """Bits of an 8-bit float."""

    def __post_init__(self) -> None:
        if self.recipe is Fp8Recipe.OFF and self.format is not Fp8Format.HYBRID:
            raise SettingError("format", "must stay hybrid with recipe=off, where it has no effect", got=self.format)

    @property
    def token_multiple(self) -> int:
        """Tokens of a matrix product must be a multiple of this: 16 for cuBLAS, 128 for blocks, 1 without FP8."""
        return {Fp8Recipe.OFF: 1, Fp8Recipe.BLOCKWISE: 128}.get(self.recipe, 16)


@dataclass(kw_only=True, slots=True)
class CommunicationConfig:
    """How gradients and parameters travel between data-parallel ranks."""

    reduce_in_float32: bool = True
    """Gradients are kept and summed in float32; false: in the dtype of the parameters."""
    overlap_grad_reduce: bool = False
    """Gradients are summed bucket by bucket during the last backward, not after it."""
    overlap_param_gather: bool = False
    """New parameters are gathered bucket by bucket during the next forward of the same rollout batch, not before it."""
    bucket_parameters: Annotated[int, Range(1, 1 << 40)] | None = None
    """Parameters of a bucket with overlap; Megatron's choice (40 million or more) when null."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise SettingError(
                "overlap_param_gather", "needs overlap_grad_reduce=true as well, which makes the buckets"
            )
        if self.bucket_parameters is not None and not self.overlap_grad_reduce:
            raise SettingError(
                "bucket_parameters", "has no effect without overlap_grad_reduce", got=self.bucket_parameters
            )


class Dispatcher(StrEnum):
    """How tokens reach the ranks of their experts."""

    ALLTOALL = "alltoall"
    ALLGATHER = "allgather"
    """Every rank gets every token; within the tensor-parallel ranks of a micro-batch, as others differ in length."""
    FLEX = "flex"
    """DeepEP, a package of its own."""


class RouterDtype(StrEnum):
    """Number format in which the router scores experts."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixture-of-experts layers. Nothing that balances is on by default: it would pull the policy about."""

    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    """How tokens reach the ranks of their experts."""
    router_dtype: RouterDtype = RouterDtype.FLOAT32
    """Number format in which the router scores experts."""
    freeze_router: bool = False
    """The router's weights stay as loaded."""
    aux_loss_coefficient: Annotated[float, Range(0, 1000)] = 0.0
    """Weight of the load-balancing loss beside the algorithm's, see `expert_load.balance`."""
    z_loss_coefficient: Annotated[float, Range(0, 1000)] = 0.0
    """Weight of the router's z-loss, see `expert_load.balance`."""
    bias_update_rate: Annotated[float, Range(0, 1)] = 0.0
    """What an optimizer step moves the routing bias of an over- or underused expert by; 0 keeps the checkpoint's."""
    capacity_factor: Annotated[float, Range(above=0, maximum=1000, note="null drops no token")] | None = None
    """Tokens of an expert beyond this many times the mean are dropped; null drops none."""
    router_replay: bool = False
    """The policy's routers choose, for every token, the experts that the engine chose when it sampled (R3, arXiv
    2510.11370), in its logprobs and in training; their weights are the routers' own. The reference and a critic choose
    for themselves. Costs layers * experts per token bytes a token between engines, driver and ranks."""
    allow_token_drop: bool = False
    """true: online algorithms accept capacity_factor, although the engine that samples drops nothing."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.allow_token_drop and self.capacity_factor is None:
            raise SettingError("allow_token_drop", "has no effect without capacity_factor", got="true")
        if self.freeze_router and (self.aux_loss_coefficient or self.z_loss_coefficient):
            raise SettingError(
                "freeze_router", "must be false with aux_loss_coefficient or z_loss_coefficient", got="true"
            )


class MomentDtype(StrEnum):
    """Number format of Adam's moments."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    """Details of `train.recompute`."""

    method: RecomputeMethod = RecomputeMethod.UNIFORM
    """full: how the layers of a pipeline stage are cut."""
    layers: Annotated[int, Range(1, 10_000)] = 1
    """full: layers of a group (uniform), or recomputed in all (block)."""
    modules: list[str] = field(default_factory=list)
    """selective: what is recomputed in every layer."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if unknown := sorted(set(self.modules) - set(RECOMPUTE_MODULES)):
            raise SettingError("modules", f"must be among {', '.join(RECOMPUTE_MODULES)}", got=", ".join(unknown))
