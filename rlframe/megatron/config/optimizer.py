"""Settings of the optimizer. Imports neither torch nor megatron."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.megatron.config.lora import in_layer
from rlframe.megatron.config.options import MomentDtype
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


class Schedule(StrEnum):
    """Courses of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"
    """Warm-up, stable, decay: constant, then linear decay over the last `decay_fraction` of the steps."""


class OptimizerName(StrEnum):
    """Rules by which gradients change weights."""

    ADAMW = "adamw"
    MUON = "muon"
    """Muon for the matrices of attention, MLPs and experts; AdamW for everything else: embedding, output layer, norms,
    biases and routers. One learning rate and one weight decay for both."""


@dataclass(kw_only=True, slots=True)
class MuonConfig:
    """Settings of `name=muon`, beside lr and weight_decay. Each matrix of the checkpoint is orthogonalised by itself:
    q, k and v, gate and up, every expert."""

    momentum: Annotated[float, Range(0, below=1)] = 0.95
    """Decay of the momentum, which is Nesterov's."""
    newton_schulz_steps: Annotated[int, Range(1, 100)] = 5
    """Number of steps of the iteration that orthogonalises an update."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Settings of the optimizer and its learning rate."""

    name: OptimizerName = OptimizerName.ADAMW
    """Rule by which gradients change weights."""
    lr: Annotated[float, Range(above=0, maximum=10)] = 1e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Range(0, 10)] = 0.0
    """Final learning rate of linear, cosine and wsd."""
    schedule: Schedule = Schedule.CONSTANT
    """Course of the learning rate after warm-up."""
    warmup_steps: Annotated[int, Range(0, 10**9)] = 0
    """Number of optimizer steps of the linear rise from 0 to lr."""
    decay_steps: Annotated[int, Range(1, 10**9, note="null: the whole run")] | None = None
    """Optimizer step at which min_lr is reached. null means the whole run."""
    decay_fraction: Annotated[float, Range(above=0, maximum=1)] = 0.1
    """For wsd: fraction of the run in which the rate decays."""
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Adam's decay of the first moment."""
    beta2: Annotated[float, Range(0, below=1)] = 0.999
    """Adam's decay of the second moment."""
    eps: Annotated[float, Range(above=0, maximum=1)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """Decoupled weight decay. Norms and biases are exempt."""
    clip_grad: Annotated[float, Range(0, 10**9, note="0 turns clipping off")] = 1.0
    """Bound to which the global gradient norm is clipped. 0 turns clipping off."""
    skip_norm_above: Annotated[float, Range(above=0, maximum=10**9)] | None = None
    """Gradient norm, before clipping, above which an optimizer step is skipped: weights and moments stay. null skips
    none."""
    skip_outlier_factor: Annotated[float, Range(above=1, maximum=10**6)] | None = None
    """Multiple of the median of the last 100 gradient norms above which an optimizer step is skipped, from the eleventh
    step on. Norms of skipped steps count too, so that a lasting rise is followed. null skips none."""
    cpu_offload_fraction: Annotated[float, Range(0, 1)] = 0.0
    """Fraction of the parameters whose main weights and moments live in host memory and are updated by the CPU
    (CUDA)."""
    precision_aware: bool = False
    """Whether main weights are kept as the 16 bits that bfloat16 parameters lack (CUDA): exact, with 2 bytes less per
    parameter."""
    moment_dtype: MomentDtype = MomentDtype.FLOAT32
    """Number format of Adam's moments. bfloat16 needs precision_aware."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Muon's own settings."""

    @property
    def skips(self) -> bool:
        """Returns whether a step may be skipped."""
        return self.skip_norm_above is not None or self.skip_outlier_factor is not None

    def caution(self, total_steps: int) -> str | None:
        """Returns a warning if the learning rate never reaches `lr` in a run of so many optimizer steps, or None."""
        if self.warmup_steps <= total_steps:
            return None
        return (
            f"optimizer.warmup_steps={self.warmup_steps} is more than the {total_steps} optimizer steps of the run, in "
            f"which the learning rate never reaches {self.lr:g}"
        )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.min_lr > self.lr:
            raise SettingError("min_lr", f"must be at most lr={self.lr}", got=self.min_lr)
        if self.moment_dtype is not MomentDtype.FLOAT32 and not self.precision_aware:
            raise SettingError("moment_dtype", "needs precision_aware=true", got=self.moment_dtype, stated=True)
        if self.precision_aware and self.cpu_offload_fraction:
            raise SettingError(
                "precision_aware",
                "must be false with cpu_offload_fraction above 0",
                why="main weights updated by the CPU are float32",
            )
        self._check_muon()

    def _check_muon(self) -> None:
        if self.name != OptimizerName.MUON:
            if self.muon != MuonConfig():
                raise SettingError("muon", f"has no effect with name={self.name}", got=self.muon, hint="remove it")
            return
        if self.precision_aware:
            raise SettingError(
                "precision_aware", "must be false with name=muon", got="true", why="only Adam's kernel has it"
            )
        if self.cpu_offload_fraction:
            raise SettingError(
                "cpu_offload_fraction",
                "must be 0 with name=muon",
                got=self.cpu_offload_fraction,
                why="matrices are orthogonalised on the device",
            )


def is_by_muon(parameter: str) -> bool:
    """Returns whether Muon updates a parameter, by its name in Megatron: the weight of a linear module of attention, of
    an MLP or of an expert.

    Not embedding and output layer, as in Liu et al. 2025 (Moonlight, arXiv 2502.16982, section 2.2). Nor routers, which
    Megatron's own Muon has: their rows are scores that the choice of experts compares, and an orthogonal update moves
    those of rare experts as far as those of common ones, away from the routes of the engines.
    """
    return in_layer(parameter) and parameter.endswith(".weight")
