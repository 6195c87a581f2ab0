"""MegatronWorker: the Ray actor of one training rank. Light until `start`, which brings in Megatron."""

import pathlib
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.cluster.worker import Worker
from rlframe.megatron import platform
from rlframe.megatron.config import Coordinates
from rlframe.megatron.microbatch import Microbatch
from rlframe.types.results import Metric
from rlframe.weight_sync.boxes import Region
from rlframe.weight_sync.layout import Layout

if TYPE_CHECKING:
    from rlframe.megatron.trainer import Trainer


class MegatronWorker(Worker):
    """Forwards typed calls to its Trainer."""

    trainer: "Trainer"

    def free_address(self) -> str:
        """`host:port` at which this worker can lead a torch.distributed rendezvous."""
        host = self.info().address
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def start(self, **setup: Any) -> Coordinates:
        """Build the model and load its weights. Arguments are those of TrainerSetup."""
        device = platform.resolve(setup.pop("device"))
        platform.install(device)
        # Megatron reads torch.cuda while it is imported, so it must come after the platform is in place.
        from rlframe.megatron.trainer import Trainer, TrainerSetup  # noqa: PLC0415

        self.trainer = Trainer(TrainerSetup(device=device, **setup))
        return self.trainer.coordinates

    def logprobs(self, microbatches: list[Microbatch], reference: bool) -> list[Tensor]:
        """See Trainer.logprobs."""
        return self.trainer.logprobs(microbatches, reference=reference)

    def train(self, steps: list[list[Microbatch]], algorithm: Algorithm, first_step: int) -> list[dict[str, Metric]]:
        """See Trainer.train."""
        return self.trainer.train(steps, algorithm, first_step=first_step)

    def save(self, folder: str) -> None:
        """See Trainer.save."""
        self.trainer.save(pathlib.Path(folder))

    def load(self, folder: str, num_optimizer_steps: int) -> None:
        """See Trainer.load."""
        self.trainer.load(pathlib.Path(folder), num_optimizer_steps=num_optimizer_steps)

    def export(self, names: list[str], dtype: torch.dtype) -> Any:
        """See Trainer.export."""
        return self.trainer.export(names, dtype)

    def weight_layout(self) -> Layout:
        """Where the Hugging Face tensors lie in this rank's memory."""
        return self.trainer.layout

    def weight_memory(self, transport: str) -> Any:
        """Handle by which other processes reach this rank's parameters."""
        return self.trainer.source.memory(transport)

    def weight_digests(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
        """Checksums of this rank's pieces, each cast to the engines' dtype first."""
        return self.trainer.source.digests(dtypes)

    def weight_box_digests(self, tensor: str, regions: Sequence[Region], dtype: torch.dtype) -> dict[Region, int]:
        """Checksums of regions of one tensor, to find out where it differs."""
        return self.trainer.source.box_digests(tensor, regions, dtype)
