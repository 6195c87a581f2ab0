"""Options of how a step is computed, sent and kept in memory, which should not change what is learned, and options of
experts.

Imports neither torch nor megatron. `training_fields` translates them into Megatron's own fields.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that Megatron-Core 0.16.1 can recompute selectively."""
MODULES_OF_EXPERTS = frozenset({"moe", "moe_act", "shared_experts"})
"""Modules of RECOMPUTE_MODULES that exist only in MoE models."""


class Recompute(StrEnum):
    """Activations that the backward pass recomputes instead of keeping them."""

    NONE = "none"
    FULL = "full"
    """Whole layers."""
    SELECTIVE = "selective"
    """The named modules of every layer."""


class RecomputeMethod(StrEnum):
    """Grouping of the layers of each chunk of a pipeline stage for recompute=full."""

    UNIFORM = "uniform"
    """Groups of recompute_options.layers layers, of which only the input is kept."""
    BLOCK = "block"
    """The first recompute_options.layers layers, one by one. The others keep their activations."""


class Attention(StrEnum):
    """Backends of Transformer Engine's attention."""

    AUTO = "auto"
    FLASH = "flash"
    """FlashAttention, from the package flash-attn."""
    FUSED = "fused"
    """The fused kernels of cuDNN."""
    UNFUSED = "unfused"


@dataclass(kw_only=True, slots=True)
class KernelConfig:
    """Operations that run as one kernel, on CUDA only."""

    attention: Attention = Attention.AUTO
    """Backend of attention. auto leaves the choice to Transformer Engine (cuDNN on Hopper)."""
    rope_fusion: bool = True
    """Whether rotary positions are one kernel: with the norms of query and key heads and the copies between them where
    positions are turned over whole heads and in all layers alike, else Transformer Engine's."""
    activation_fusion: bool = True
    """Whether SwiGLU is one kernel: of the operations between the two matrix products only its input is kept."""
    permute_fusion: bool = True
    """Whether sorting tokens by expert is one kernel."""
    expert_products: bool = True
    """Whether the products of all experts, and the gradients of their weights, are one kernel of rlframe's each, on
    Hopper and newer GPUs: for experts without biases in bfloat16 or float16, with sizes that are multiples of 128.
    Gradients need `gradient_accumulation_fusion` and a buffer in float32. Other products are Transformer Engine's, as
    are all but the gradients with `communication.overlap_grad_reduce`."""
    cutlass_experts: bool = True
    """Whether Transformer Engine computes the products of all experts by one CUTLASS kernel instead of one cuBLAS
    product each: 1.5 to 1.7 times the tokens a second on layers of Qwen3-30B-A3B, which otherwise wait for launches. It
    has it for bfloat16 without biases on Hopper, if sizes are multiples of 128. Other products remain cuBLAS's."""
    optimizer_fusion: bool = True
    """Whether AdamW updates all parameters by one kernel of rlframe's, and one computes the gradient norm, from a run's
    second step on. It spares the host what Megatron and Transformer Engine do for each parameter. Not for
    `optimizer.name=muon`, `optimizer.cpu_offload_fraction` and `mtp.mode=train`."""
    gradient_accumulation_fusion: bool = True
    """Whether matrix products of Transformer Engine's layers add to the gradient buffer themselves. The embedding and
    the output layer are Megatron's own and would need APEX for it."""


class Fp8Recipe(StrEnum):
    """Scales of 8-bit floats."""

    OFF = "off"
    DELAYED = "delayed"
    """One scale per tensor, from past maxima."""
    TENSORWISE = "tensorwise"
    """One scale per tensor, from its own maximum."""
    BLOCKWISE = "blockwise"
    """One scale per block of 128 (128 x 128 in weights), as in DeepSeek-V3. Hopper only."""


class Fp8Format(StrEnum):
    """Bits of an 8-bit float."""

    E4M3 = "e4m3"
    """4 bits of exponent, everywhere."""
    HYBRID = "hybrid"
    """e4m3 forward, e5m2 for gradients."""


@dataclass(kw_only=True, slots=True)
class Fp8Config:
    """Settings of matrix products in 8-bit floats (CUDA; bfloat16 elsewhere). The policy then differs more from engines
    that sample in bfloat16."""

    recipe: Fp8Recipe = Fp8Recipe.OFF
    """Scales of 8-bit floats. off computes in `dtype`."""
    format: Fp8Format = Fp8Format.HYBRID
    """Bits of an 8-bit float."""

    def __post_init__(self) -> None:
        if self.recipe is Fp8Recipe.OFF and self.format is not Fp8Format.HYBRID:
            raise SettingError("format", "must stay hybrid with recipe=off, where it has no effect", got=self.format)

    @property
    def token_multiple(self) -> int:
        """Number that the tokens of a matrix product must be a multiple of: 16 for cuBLAS, 128 for blocks, 1 without
        FP8."""
        return {Fp8Recipe.OFF: 1, Fp8Recipe.BLOCKWISE: 128}.get(self.recipe, 16)


@dataclass(kw_only=True, slots=True)
class CommunicationConfig:
    """Settings of the communication of gradients and parameters between data-parallel ranks."""

    reduce_in_float32: bool = True
    """Whether gradients are kept and summed in float32. Otherwise in the number format of the parameters."""
    overlap_grad_reduce: bool = False
    """Whether gradients are summed bucket by bucket during the last backward pass, instead of after it."""
    overlap_param_gather: bool = False
    """Whether new parameters are gathered bucket by bucket during the next forward pass of the same rollout batch,
    instead of before it. Not with adapters, nor with rollout.logprobs=exact."""
    bucket_parameters: Annotated[int, Range(1, 1 << 40)] | None = None
    """Number of parameters of a bucket with overlap. null means Megatron's choice (40 million or more)."""

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


class ContextCommunication(StrEnum):
    """Ways in which the ranks that share a sequence exchange what attention needs: Megatron's `cp_comm_type`."""

    P2P = "p2p"
    """Keys and values travel round a ring of ranks while attention is computed (ring attention). On a CPU they are
    gathered, with the same results."""
    A2A = "a2a"
    """Each rank gets all tokens of its part of the heads, and gives the outputs back (DeepSpeed Ulysses). Needs tp * cp
    to divide the heads of queries and of keys. The only one for sliding windows and sinks."""
    ALL_GATHER = "all_gather"
    """Each rank gets all keys and values before it computes."""


@dataclass(kw_only=True, slots=True)
class ContextParallelConfig:
    """Settings of context parallelism, whose number of ranks is `cp` of `parallel` (`c2`)."""

    communication: ContextCommunication = ContextCommunication.P2P
    """Way in which the ranks that share a sequence exchange keys and values. Gated delta nets always exchange heads."""
    dynamic: bool = False
    """Whether the sequences of a micro-batch are whole on a rank each, where that gives the ranks about as many tokens.
    Then they exchange nothing in it. Others are shared as ever, those that are longer than a rank's micro-batch among
    them."""


class Dispatcher(StrEnum):
    """Ways in which tokens reach the ranks of their experts."""

    ALLTOALL = "alltoall"
    ALLGATHER = "allgather"
    """Every rank gets every token. Only within the tensor-parallel ranks of a micro-batch, because others differ in
    length."""
    FLEX = "flex"
    """DeepEP, which is a package of its own."""


class RouterDtype(StrEnum):
    """Number format in which the router scores experts."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Settings of mixture-of-experts layers. No load balancing is on by default, because it would move the policy."""

    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    """Way in which tokens reach the ranks of their experts."""
    send_once: bool = True
    """Whether `alltoall` sends a token once to each rank that has experts of its, and not once for each of them. The
    rank's sum of what they give is rounded to `train.dtype` on its way back. Experts that several ranks share (etp)
    and FP8 send one for each expert."""
    router_dtype: RouterDtype = RouterDtype.FLOAT32
    """Number format in which the router scores experts."""
    freeze_router: bool = False
    """Whether the router's weights stay as loaded."""
    aux_loss_coefficient: Annotated[float, Range(0, 1000)] = 0.0
    """Weight of the load-balancing loss added to the algorithm's; see `expert_load.balance`. Padding takes part in it:
    with context parallelism up to 2 * cp - 1 tokens a sequence."""
    z_loss_coefficient: Annotated[float, Range(0, 1000)] = 0.0
    """Weight of the router's z-loss, see `expert_load.balance`. Padding takes part in it too."""
    bias_update_rate: Annotated[float, Range(0, 1)] = 0.0
    """Change per optimizer step of the routing bias of an over- or underused expert. Padding takes part in the count.
    The reference keeps its bias. 0 keeps the checkpoint's bias."""
    capacity_factor: Annotated[float, Range(above=0, maximum=1000, note="null drops no token")] | None = None
    """Multiple of the mean number of tokens beyond which an expert drops tokens. null drops none."""
    router_replay: bool = False
    """Whether the policy's routers choose, for every token, the experts that the engine chose when it sampled (R3,
    arXiv 2510.11370), in its logprobs and in training. The weights of the experts are the routers' own. The reference
    and a critic choose for themselves. It costs layers * experts per token bytes a token between engines, driver and
    ranks."""
    allow_token_drop: bool = False
    """Whether online algorithms accept capacity_factor, although the engine that samples drops nothing."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.send_once and self.dispatcher is not Dispatcher.ALLTOALL:
            raise SettingError(
                "send_once", f"has no effect with dispatcher={self.dispatcher}", got="false", hint="remove it"
            )
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
    """For full: grouping of the layers of each chunk of a pipeline stage."""
    layers: Annotated[int, Range(1, 10_000)] = 1
    """For full: number of layers of a group (uniform), or number of recomputed layers (block)."""
    modules: list[str] = field(default_factory=list)
    """For selective: modules that are recomputed in every layer."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if unknown := sorted(set(self.modules) - set(RECOMPUTE_MODULES)):
            raise SettingError("modules", f"must be among {', '.join(RECOMPUTE_MODULES)}", got=", ".join(unknown))
