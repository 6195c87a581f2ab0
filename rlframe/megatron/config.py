"""Settings of the training side. Imports neither torch nor megatron, so that a config is checked before they load."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

SHORTHAND = re.compile(r"([a-z])(\d+)")
AXES = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How many ways each axis is split, as in AReaL's shorthand: `d2p1t2`, or `d1p1t2|ffn:d1p1t1e2` for MoE layers."""

    dp: int = 1
    """Data parallel: ranks with different sequences and equal weights."""
    tp: int = 1
    """Tensor parallel, always with sequence parallelism when above 1."""
    pp: int = 1
    """Pipeline parallel."""
    cp: int = 1
    """Context parallel."""
    ep: int = 1
    """Expert parallel: ranks that share out the experts of a layer. It does not divide DP."""
    etp: int = 1
    """Tensor parallel inside an expert."""

    @property
    def world(self) -> int:
        """Number of ranks: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Expert data parallel: copies of each expert, world / (etp * ep * pp)."""
        return self.world // (self.etp * self.ep * self.pp)

    @classmethod
    def parse(cls, text: str) -> "Parallel":
        """`d2t2p1`, `d2e2` (EP over the ranks of the other axes) or `d4t1|ffn:d1t1e4` (expert axes spelled out).

        Raises:
            ValueError: an unknown or repeated letter, a size of 0, or expert axes that do not fill the same world.
        """
        dense_text, bar, expert_text = text.removeprefix("attn:").partition("|")
        dense = cls._axes(dense_text, text)
        if not bar:
            parallel = cls(**dense)
        else:
            expert = cls._axes(expert_text.removeprefix("ffn:"), text)
            sizes = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1} | expert
            if "ep" in dense or "cp" in expert:
                raise ValueError(f"{text!r}: e belongs to the ffn part and c to the attention part")
            parallel = cls(**dense, ep=sizes["ep"], etp=sizes["tp"])
            if sizes["pp"] != parallel.pp:
                raise ValueError(f"{text!r}: p must be the same in both parts, got {parallel.pp} and {sizes['pp']}")
            expert_world = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["ep"]
            if expert_world != parallel.world:
                raise ValueError(
                    f"{text!r}: the ffn part fills {expert_world} ranks, the attention part {parallel.world}"
                )
        ranks = parallel.etp * parallel.ep * parallel.pp
        if parallel.world % ranks:
            raise ValueError(
                f"{text!r}: world {parallel.world} = dp {parallel.dp} * tp {parallel.tp} * pp {parallel.pp} * cp "
                f"{parallel.cp} must be a multiple of etp * ep * pp = {ranks}"
            )
        return parallel

    @staticmethod
    def _axes(part: str, text: str) -> dict[str, int]:
        pairs = SHORTHAND.findall(part)
        letters = [letter for letter, _ in pairs]
        if not pairs or "".join(letter + size for letter, size in pairs) != part or len(set(letters)) != len(letters):
            raise ValueError(f"{text!r} is not a layout such as d2, d1t2p1 or d4t1|ffn:d1t1e4")
        if unknown := set(letters) - set(AXES):
            raise ValueError(f"{text!r}: unknown axis {sorted(unknown)[0]!r}; known are {', '.join(AXES)}")
        if any(int(size) < 1 for _, size in pairs):
            raise ValueError(f"{text!r}: every size must be at least 1")
        return {AXES[letter]: int(size) for letter, size in pairs}


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Where a rank stands in the layout."""

    rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    ep_rank: int
    reports: bool
    """True on the one rank per data-parallel index that has the results: last pipeline stage, tensor rank 0."""


class Schedule(StrEnum):
    """How the learning rate moves after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"
    """Warm-up, stable, decay: constant, then linear decay over the last `decay_fraction` of the steps."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Where linear, cosine and wsd end."""
    schedule: Schedule = Schedule.CONSTANT
    """How the learning rate moves after warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear rise from 0 to lr."""
    decay_steps: int | None = None
    """Optimizer step at which min_lr is reached; the whole run when null."""
    decay_fraction: float = 0.1
    """wsd only: the part of the run that decays."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.999
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    clip_grad: float = 1.0
    """Global gradient norm is clipped to this; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr must lie in [0, lr={self.lr}], got {self.min_lr}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ValueError(f"decay_steps must be at least 1, or null for the whole run, got {self.decay_steps}")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction must lie in (0, 1], got {self.decay_fraction}")
        if self.clip_grad < 0:
            raise ValueError(f"clip_grad must be at least 0 (0 turns clipping off), got {self.clip_grad}")


class Dtype(StrEnum):
    """Number format of the parameters and activations in training."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass instead of kept."""

    NONE = "none"
    FULL = "full"


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The Megatron worker group."""

    parallel: str = "d1"
    """Layout shorthand, see `Parallel`: its product is the number of ranks."""
    dtype: Dtype = Dtype.BFLOAT16
    """float32 on CPU; bfloat16 keeps float32 main weights in the optimizer."""
    max_tokens_per_microbatch: int = 16384
    """Token budget of one packed forward on one rank. A longer sequence than this is refused."""
    minibatches: int = 1
    """Optimizer steps per rollout batch: the batch is cut into this many equal parts, groups kept whole."""
    epochs: int = 1
    """Passes over each rollout batch."""
    recompute: Recompute = Recompute.NONE
    """full: recompute every layer, one at a time."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its learning rate."""

    def __post_init__(self) -> None:
        try:
            Parallel.parse(self.parallel)
        except ValueError as error:
            raise ValueError(f"parallel is wrong: {error}") from error
        for name in ("max_tokens_per_microbatch", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
