"""What a rollout engine is. One file each; vLLM, SGLang and transformers differ only behind these methods."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from rlframe.types.rollout import Completion, GenerationRequest
from rlframe.weight_sync.channel import WeightDestination


class RolloutEngine(ABC):
    """Base of all engines. An engine's file ends `COMPONENT, CONFIG = TheEngine, TheConfig`.

    Two rules no engine may break: it samples only at a verified version, and every completion names that version.
    """

    weights: WeightDestination
    """The engine's memory as weight sync sees it: recorded from the engine's own loader, and its version."""

    @abstractmethod
    def __init__(self, config: Any, *, folder: Path, dtype: torch.dtype, device: str, random_seed: int | None = None):
        """Load the model by the engine's own full path, so that calibration compares what the engine really holds.

        Args:
            config: of the file's CONFIG.
            folder: model and tokenizer in Hugging Face format.
            random_seed: draw the weights from this seed (`models.random_init`); the folder then needs none.
        """

    @abstractmethod
    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """One completion for each request, in their order.

        Raises:
            WeightSyncFailed: the weights in memory are not verified.
            ValueError: a prompt is empty, or longer with its response than the model's positions.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free what can be made again, so that training may use the device. Weights stay where weight sync put them."""

    @abstractmethod
    def wake(self) -> None:
        """Undo `sleep`."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and processes; the engine is not used again."""
