"""What the ranks of a model start with: made once by whoever composes the run, and sent whole."""

from dataclasses import dataclass, field

import torch

from rlframe.algorithms.reference import ReferenceUpdateConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """Everything a rank of any model needs to start; of a frozen model that is all."""

    model: ModelConfig
    train: TrainConfig
    device: torch.device
    temperature: float = 1.0
    """Logits are divided by it, as the engine does when it samples; a head of C outputs has none."""
    num_outputs: int | None = None
    """Outputs of the model's head; None is a language model. See Architecture."""
    timeout_s: float
    """Longest wait of a collective."""
    rank: int = 0
    """The group fills it in for each rank when they meet, and `init_method` with it."""
    init_method: str = ""
    """`tcp://host:port` of the first rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSetup(RankSetup):
    """Everything a rank of a model in training needs to start."""

    seed: int
    total_optimizer_steps: int
    """Length of the learning-rate schedule."""
    with_reference: bool
    reference_update: ReferenceUpdateConfig = field(default_factory=ReferenceUpdateConfig)
    """How the reference follows the weights in training."""
    teacher: ModelConfig | None = None
    """The model to learn from, when these ranks hold it."""
