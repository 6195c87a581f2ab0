"""A trainer of one rank in the test process, and a vLLM engine as the only destination of its weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframe.rollout.vllm import VllmEngine
from rlframe.weight_sync.channel import DestinationGroup, Received, SourceGroup, WeightSource, WeightSync
from rlframe.weight_sync.layout import record


class Trainer(SourceGroup):
    """Holds whole tensors by their names in the checkpoint."""

    def __init__(self, weights: dict[str, Tensor]):
        self.parameters = {name: value.clone() for name, value in weights.items()}
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        self.source = WeightSource(record(_load, self.parameters, shapes), self.parameters)

    def train(self, weights: dict[str, Tensor]) -> None:
        """Take on other values, in place."""
        for name, value in weights.items():
            self.parameters[name].copy_(value)

    def call(self, method: str, arguments: Sequence[tuple] | None = None) -> list[Any]:
        (own,) = arguments or [()]
        return [getattr(self.source, method)(*own)]


class OneEngine(DestinationGroup):
    """What RolloutGroup and RolloutWorker do for an engine, without Ray."""

    def __init__(self, engine: VllmEngine):
        self.engine = engine
        self.after_pause: Callable[[], Any] = lambda: None
        """Called in each sync when nothing runs any more and the old weights are still there."""

    def engines(self) -> list[int]:
        return [0] * self.engine.config.devices_per_engine

    def call(
        self, method: str, arguments: Sequence[tuple] | None = None, *, engines: Sequence[int] | None = None
    ) -> list[Any]:
        return self.engine.on_ranks(method, arguments or [()] * len(self.engines()))

    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:
        self.engine.gate.begin(version)
        self.engine.pause()
        self.after_pause()
        return self.call("receive")

    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        self.engine.resume()
        self.engine.gate.commit(version)

    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        self.engine.gate.fail(reason)
        self.engine.abort()


def synced(engine: VllmEngine, weights: dict[str, Tensor]) -> tuple[Trainer, OneEngine, WeightSync]:
    """A trainer with `weights`, the engine with the same ones, proved to be version 0."""
    trainer, destination = Trainer(weights), OneEngine(engine)
    sync = WeightSync(trainer, destination)
    sync.connect()
    sync.calibrate(version=0)
    return trainer, destination, sync


def perturbed(weights: dict[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """The weights after a step that is felt in every logit."""
    generator = torch.Generator().manual_seed(seed)
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def _load(parameters: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
    for name, value in checkpoint.items():
        parameters[name].copy_(value)
