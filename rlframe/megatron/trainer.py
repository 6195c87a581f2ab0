"""Trainer: one rank's model, optimizer and weight-sync source. Imports Megatron; `worker.py` makes it the actor."""

import pathlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.megatron import checkpoint, checkpoint_files, forward, model, optimizer, parallel
from rlframe.megatron.checkpoint_files import Staged, Written
from rlframe.megatron.config import TrainConfig
from rlframe.megatron.layout import Parallel
from rlframe.megatron.microbatch import Microbatch
from rlframe.megatron.reference import ReferenceWeights
from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.models.random_init import random_tensor
from rlframe.types.results import Mean, Metric, merge
from rlframe.weight_sync.endpoints import WeightSource
from rlframe.weight_sync.layout import Layout, clear_padding, load_tensor, record


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSetup:
    """Everything a rank needs to start."""

    rank: int
    init_method: str
    device: torch.device
    model: ModelConfig
    train: TrainConfig
    seed: int
    temperature: float
    """Logits are divided by it, as the engine does when it samples."""
    total_optimizer_steps: int
    """Length of the learning-rate schedule."""
    timeout_s: float
    with_reference: bool


class Trainer:
    """One rank. Every method is called on all ranks of the group at once."""

    def __init__(self, setup: TrainerSetup):
        self.setup = setup
        self.coordinates = parallel.initialize(
            Parallel.parse(setup.train.parallel),
            rank=setup.rank,
            device=setup.device,
            init_method=setup.init_method,
            seed=setup.seed,
            timeout_s=setup.timeout_s,
        )
        folder = resolve(setup.model)
        family = load_family(folder)
        architecture = family.architecture(read_config(folder))
        self.model = model.build(architecture, setup.train, device=setup.device)
        self.layout: Layout = record(
            partial(family.load, architecture=architecture, shard=self.model.shard),
            self.model.parameters,
            family.tensors(architecture),
        )
        self._load_weights(folder)
        self.reference = ReferenceWeights(self.model) if setup.with_reference else None
        self.source = WeightSource(self.layout, self.model.parameters)
        self.optimizer = optimizer.build(self.model, setup.train.optimizer)
        self.staged: Staged | None = None

    @torch.no_grad()
    def _load_weights(self, folder: pathlib.Path) -> None:
        clear_padding(self.layout, self.model.parameters)
        if self.setup.model.random_init:
            for name, shape in self.layout.tensors.items():
                if name in self.layout.boxes:
                    value = random_tensor(name, shape, seed=self.setup.seed, device=str(self.setup.device))
                    load_tensor(self.layout, self.model.parameters, name, value)
            return
        reader = CheckpointReader(folder)
        for name in self.layout.boxes:
            load_tensor(self.layout, self.model.parameters, name, reader.tensor(name))

    def logprobs(
        self, microbatches: list[Microbatch], *, reference: bool, temperature: float | None = None
    ) -> list[Tensor]:
        """[T] nats per micro-batch; empty unless this rank reports. With `reference`, under the frozen weights.

        Args:
            temperature: logits are divided by it; that of the setup when None.
        """
        temperature = self.setup.temperature if temperature is None else temperature
        weights = nullcontext()
        if reference:
            assert self.reference is not None
            weights = self.reference.active()
        with weights:
            return forward.compute_logprobs(self.model, microbatches, temperature=temperature)

    def train(self, steps: list[list[Microbatch]], algorithm: Algorithm, *, first_step: int) -> list[dict[str, Metric]]:
        """One optimizer step per entry of `steps`; their metrics, merged over this rank's micro-batches.

        Args:
            first_step: number of optimizer steps the run has taken before.
        """
        results = []
        for index, microbatches in enumerate(steps):
            shares = forward.accumulate_gradients(
                self.model, microbatches, algorithm, temperature=self.setup.temperature
            )
            updated = optimizer.step(
                self.optimizer,
                self.setup.train.optimizer,
                step_index=first_step + index,
                total_steps=self.setup.total_optimizer_steps,
            )
            results.append(merge(shares) | {key: Mean(value, 1.0) for key, value in updated.items()})
        # Engines read these parameters from their own processes as soon as this call has returned.
        torch.cuda.synchronize()
        return results

    def stage(self, folder: pathlib.Path, *, copy: bool) -> None:
        """Plan the files of the training state; see `checkpoint.stage`. `write` and `complete` do the rest."""
        self.staged = checkpoint.stage(self.model, self.optimizer, folder, copy=copy)

    def write(self, *, verify: bool) -> Written:
        """Write this rank's file of what was staged; may run beside training if that was copied."""
        assert self.staged is not None
        return checkpoint_files.write(self.staged, verify=verify)

    def complete(self, written: list[Written]) -> None:
        """The end of a save, with what all ranks wrote."""
        assert self.staged is not None
        checkpoint.complete(self.staged, written)
        self.staged = None

    def save(self, folder: pathlib.Path) -> None:
        """Write the training state, all at once; see `checkpoint.save`."""
        checkpoint.save(self.model, self.optimizer, folder)

    def verify(self, folder: pathlib.Path) -> None:
        """Compare this rank's share of the files in `folder` with their checksums."""
        world = Parallel.parse(self.setup.train.parallel).world
        checkpoint_files.verify_share(folder, rank=self.setup.rank, world=world)

    def load(self, folder: pathlib.Path, *, num_optimizer_steps: int) -> None:
        """Go on from the training state in `folder`, saved after `num_optimizer_steps`."""
        checkpoint.load(self.model, self.optimizer, folder, num_optimizer_steps=num_optimizer_steps)
        torch.cuda.synchronize()

    def load_weights(self, folder: pathlib.Path) -> None:
        """Begin with the weights of the distributed checkpoint in `folder` instead; so does the reference."""
        checkpoint.load_weights(self.model, self.optimizer, folder)
        self.reference = ReferenceWeights(self.model) if self.setup.with_reference else None
        torch.cuda.synchronize()

    def export(self, names: list[str], dtype: torch.dtype) -> Mapping[str, list[tuple[tuple[int, ...], Tensor]]]:
        """This rank's pieces of the Hugging Face tensors `names`: (row, rows, col, cols) and the values, on the CPU."""
        return {
            name: [
                (tuple(box.region), box.view(self.model.parameters).to("cpu", dtype, copy=True))
                for box in self.layout.boxes.get(name, ())
            ]
            for name in names
        }
