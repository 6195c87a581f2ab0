"""Settings of the training side. Imports neither torch nor megatron, so that a configuration is checked before they
load."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.mtp import MtpConfig
from rlframe.megatron.config.optimizer import OptimizerConfig, OptimizerName
from rlframe.megatron.config.options import (
    CommunicationConfig,
    ContextParallelConfig,
    Fp8Config,
    Fp8Recipe,
    KernelConfig,
    MoeConfig,
    Recompute,
    RecomputeConfig,
    RecomputeMethod,
)
from rlframe.megatron.config.parallel import Parallel
from rlframe.models.config import ModelConfig
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.build import FormerName
from rlframe.utils.errors import SettingError


class Dtype(StrEnum):
    """Number format of the parameters and activations in training."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Settings of the Megatron worker group."""

    parallel: str | Parallel = "d1"
    """Layout of the ranks, in shorthand (`d2t2p2`) or as the fields of `Parallel` (`{tp: 2, pp: 2}`)."""
    dtype: Dtype = Dtype.BFLOAT16
    """Number format of training. float32 on CPU; bfloat16 keeps float32 main weights in the optimizer."""
    max_tokens_per_microbatch: Annotated[int, Range(1, 1 << 27)] = 16384
    """Token budget of one packed forward pass on one rank. A sequence longer than this times the context-parallel
    ranks, which share its tokens, is refused. Padding is not counted: at most 2 * cp - 1 tokens a sequence, and the
    tokens that make a rank's number a multiple of tp, on a GPU of 4 * tp."""
    num_minibatches: Annotated[int, Range(1, 1 << 16), FormerName("minibatches")] = 1
    """Number of optimizer steps per rollout batch: the batch is divided into this many equal parts of whole groups."""
    epochs_per_batch: Annotated[int, Range(1, 1000), FormerName("epochs")] = 1
    """Number of passes over each rollout batch."""
    share_prompts: bool = False
    """Whether first tokens that the rollouts of a group, or both responses of a pair, have in common are computed once:
    forward, backward, and in the logprobs of the policy, the reference, the critic and a teacher. The gradients are the
    same but for rounding. They also count once in max_tokens_per_microbatch."""
    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass recomputes instead of keeping them."""
    recompute_options: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Details of recompute."""
    offload_activations: bool = False
    """Whether the inputs of the recomputed layers wait in pinned host memory for the backward pass (CUDA). Needs
    recompute=full."""
    logits_chunk_tokens: Annotated[int, Range(1, 1 << 27)] | None = None
    """Tokens of a rank whose logits exist at once, forward and backward; logits are computed twice. null computes those
    of a micro-batch at once, which takes 2 * vocabulary / tp bytes a token in bfloat16."""
    deterministic: bool = False
    """Whether two runs on the same layout give the same bits. Slower on CUDA."""
    offload_optimizer: bool = False
    """Whether, while engines use the same devices (cluster.colocate), main weights and moments wait in pinned host
    memory, and gradients are dropped. Parameters stay, for weight sync."""
    release_memory: bool = False
    """Whether, while engines use the same devices (cluster.colocate), gradients are dropped and the memory that
    micro-batches took goes back to the device. Main weights and moments stay there. offload_optimizer does it too."""
    kernels: KernelConfig = field(default_factory=KernelConfig)
    """For CUDA: operations that run as one kernel."""
    fp8: Fp8Config = field(default_factory=Fp8Config)
    """For CUDA: matrix products in 8-bit floats."""
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    """Context parallelism: ranks that share the tokens of each sequence."""
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    """Communication of gradients and parameters between data-parallel ranks."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Mixture-of-experts layers."""
    mtp: MtpConfig = field(default_factory=MtpConfig)
    """The head for multi-token prediction."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its learning rate."""
    lora: LoraConfig | None = None
    """Low-rank adapters, trained next to frozen weights. null trains the weights themselves."""
    norms_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 0
    """Number of steps that train the model between two measurements of the gradient's norm, and of the update's
    relative to the weights, by part of the model. 0 measures neither."""

    @property
    def sequence_tokens(self) -> int:
        """Token budget of one packed forward pass over all context-parallel ranks, and so of the longest sequence."""
        return self.max_tokens_per_microbatch * Parallel.parse(self.parallel).cp

    @property
    def joins_experts(self) -> bool:
        """Returns whether all experts of a layer are one operation for autograd, on a GPU that has the kernels. It adds
        their gradients to the buffer without a word to Megatron, which must not wait for them."""
        kernels = self.kernels
        fuses = kernels.expert_products and kernels.gradient_accumulation_fusion
        return fuses and not self.communication.overlap_grad_reduce and self.fp8.recipe is Fp8Recipe.OFF

    @property
    def fuses_optimizer(self) -> bool:
        """Returns whether one kernel updates all parameters, on a GPU: by AdamW, none of them on the host, and with one
        norm for all gradients. Megatron-Core clips a head for multi-token prediction by itself from 0.19 on."""
        by_adam = self.optimizer.name == OptimizerName.ADAMW and not self.optimizer.cpu_offload_fraction
        return self.kernels.optimizer_fusion and by_adam and not self.mtp.trains

    @property
    def sleeps(self) -> bool:
        """Returns whether the policy leaves memory to engines on the same devices while they work."""
        return self.offload_optimizer or self.release_memory

    @property
    def sleep_setting(self) -> str:
        """Returns the name of the setting by which `sleeps` is true."""
        return "offload_optimizer" if self.offload_optimizer else "release_memory"

    def measures_norms(self, step: int) -> bool:
        """Returns whether the norms of a step are measured.

        Args:
            step: number of the batch that is trained on, from 1.
        """
        return self.norms_every_steps > 0 and step % self.norms_every_steps == 0

    def __post_init__(self) -> None:
        try:
            Parallel.parse(self.parallel)
        except ValueError as error:
            raise SettingError("parallel", "is wrong", why=f"{error}") from error
        check_bounds(self)
        self._check_recompute()
        self._check_dtype()
        self._check_lora()
        self._check_communication()

    def _check_dtype(self) -> None:
        needing = {
            "fp8.recipe": self.fp8.recipe is not Fp8Recipe.OFF,
            "optimizer.precision_aware": self.optimizer.precision_aware,
            "communication.reduce_in_float32=false": not self.communication.reduce_in_float32,
        }
        for key, wanted in needing.items():
            if wanted and self.dtype != Dtype.BFLOAT16:
                raise SettingError(key, "needs dtype=bfloat16", got=f"dtype={self.dtype}")

    def _check_lora(self) -> None:
        if self.lora is not None and self.optimizer.name == OptimizerName.MUON:
            raise SettingError(
                "optimizer.name",
                "must be adamw with lora",
                got="muon",
                why="Muon orthogonalises the update of a weight, of which A and B are factors",
            )
        if self.lora is not None and self.mtp.trains:
            raise SettingError(
                "mtp.mode",
                "must be drop or keep with lora",
                got="train",
                why="PEFT's files have no place for the head, so that adapters could not be served with it",
            )

    def _check_communication(self) -> None:
        parallel = Parallel.parse(self.parallel)
        if self.communication.overlap_grad_reduce and parallel.dp * parallel.cp == parallel.edp == 1:
            raise SettingError(
                "communication.overlap_grad_reduce",
                f"has no effect with parallel={self.parallel}, where no two ranks hold the same parameters",
                got="true",
                hint="remove it",
            )
        if self.communication.overlap_param_gather and self.num_minibatches * self.epochs_per_batch == 1:
            raise SettingError(
                "communication.overlap_param_gather",
                "has no effect with num_minibatches * epochs_per_batch = 1",
                why="between rollout batches the engines need all parameters at once, so only a second "
                "optimizer step can hide the gather",
            )
        if self.communication.overlap_param_gather and self.lora is not None:
            raise SettingError(
                "communication.overlap_param_gather",
                "must be false with lora",
                got="true",
                why="Megatron waits for the parameters of each module that is called, and lists hold those of adapters",
            )

    def _check_recompute(self) -> None:
        options, default = self.recompute_options, RecomputeConfig()
        if self.recompute is not Recompute.FULL and (options.method, options.layers) != (default.method, 1):
            raise SettingError(
                "recompute_options.method",
                f"and layers have no effect with recompute={self.recompute}",
                got=f"{options.method} and {options.layers}",
                hint="set recompute=full or remove them",
            )
        if self.recompute is not Recompute.SELECTIVE and options.modules:
            raise SettingError(
                "recompute_options.modules",
                f"has no effect with recompute={self.recompute}",
                got=options.modules,
                hint="set recompute=selective or remove it",
            )
        whole = self.recompute is Recompute.FULL and options.method is RecomputeMethod.UNIFORM
        if self.offload_activations and not whole:
            raise SettingError(
                "offload_activations",
                "needs recompute=full with recompute_options.method=uniform",
                got=f"recompute={self.recompute}, method={options.method}",
                why="the other activations are so many that the host link takes longer than computing them again",
            )
        if self.recompute is Recompute.SELECTIVE and not options.modules:
            raise SettingError(
                "recompute", "needs recompute_options.modules, such as [mlp]", got="selective", stated=True
            )


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """Settings of the critic's worker group, for algorithms with a critic."""

    model: ModelConfig | None = None
    """Model of the critic's initial weights, with or without a value head. null means `model`. A new head is zeros,
    so that the first values are 0."""
    train: TrainConfig | None = None
    """Settings of its ranks and its optimizer. Missing entries are as in `train`."""
    colocate: bool = True
    """Whether it shares the policy's devices and takes turns with it. Otherwise it has devices of its own, after the
    policy's."""
