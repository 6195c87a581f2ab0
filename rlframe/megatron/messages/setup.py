"""The settings that a model's ranks start with. They are created once, when the run is composed, and sent whole."""

from dataclasses import dataclass, field

import torch

from rlframe.algorithms.reference import ReferenceUpdateConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """The settings that a rank of any model needs to start. A frozen model needs no others."""

    model: ModelConfig
    train: TrainConfig
    device: torch.device
    temperature: float = 1.0
    """Divisor of the logits, the same as in the engine's sampling. A head of C outputs has none."""
    num_outputs: int | None = None
    """Number of outputs of the model's head. None means a language model. See Architecture."""
    timeout_s: float
    """Greatest duration of a collective in seconds."""
    rank: int = 0
    """Rank in the world. The group sets it for each rank when they connect, together with `init_method`."""
    init_method: str = ""
    """Address `tcp://host:port` of the first rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSetup(RankSetup):
    """The settings that a rank of a model in training needs to start."""

    seed: int
    total_optimizer_steps: int
    """Number of optimizer steps of the learning-rate schedule."""
    with_reference: bool
    reference_update: ReferenceUpdateConfig = field(default_factory=ReferenceUpdateConfig)
    """Rule by which the reference follows the weights in training."""
    float32: bool = False
    """Whether the model computes in float32, whatever the number format of its parameters. See `Model.float32`."""
    teacher: ModelConfig | None = None
    """The teacher, if these ranks hold it."""
    merges: bool = True
    """Whether engines get the weights with merged adapters, which are then held. Otherwise they get the adapters, or
    there are none, and only exports are merged."""
