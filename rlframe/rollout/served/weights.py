"""The weights with which an engine begins: those of a checkpoint, what quantised ones stand for, or random ones."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.served.plain import dequantized_weights, is_quantized
from rlframe.rollout.served.quantized import quantized_weights
from rlframe.rollout.served.recording import checkpoint_tensors, random_weights
from rlframe.weight_sync.layout.memory import MemoryLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstWeights:
    """The source of the tensors that one rank loads."""

    folder: Path
    random_seed: int | None
    """Seed of `models.random_init`. None for those of the checkpoint."""
    engine_format: EngineFormat
    """Number format in which the engine holds matrices."""
    dtype: torch.dtype
    """Number format in which it computes."""
    layout: MemoryLayout | None
    """Layout of the tensors in the rank's parameters. None if it could not be recorded."""

    def read(self, own: Callable[[], Iterable[tuple[str, Tensor]]], *, device: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors as the engine holds them.

        Args:
            own: reads the files by the engine's own loader.
            device: device that draws and quantises.
        """
        plain = self._plain(own, device=device)
        if self.engine_format is EngineFormat.NONE:
            yield from plain
        else:
            yield from quantized_weights(plain, self.engine_format, dtype=self.dtype, device=device)

    def _plain(self, own: Callable[[], Iterable[tuple[str, Tensor]]], *, device: str) -> Iterable[tuple[str, Tensor]]:
        """Returns the checkpoint's tensors, or random ones. Tensors are drawn and dequantised only if the rank holds
        part of them."""
        if self.random_seed is None and not is_quantized(self.folder):
            return own()
        tensors = checkpoint_tensors(self.folder)
        held = [name for name in tensors if self.layout is None or name in self.layout.boxes]
        if self.random_seed is None:
            return dequantized_weights(self.folder, held)
        return random_weights(held, self.folder, seed=self.random_seed, device=device)
