"""Trainer: one rank's model, optimizer and weight-sync source. Imports Megatron; `worker.py` wraps it in an actor."""

import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict

import torch
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.cluster.watch.marks import mark
from rlframe.megatron.checkpoint import checksums, files
from rlframe.megatron.checkpoint import state as checkpoint
from rlframe.megatron.checkpoint.files import Written
from rlframe.megatron.checkpoint.staging import HostMemory, Staged
from rlframe.megatron.config.mtp import in_head
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.lora import state as lora_state
from rlframe.megatron.lora.merge import MergedWeights, WithoutAdapters
from rlframe.megatron.lora.send import MergedOnDemand, SentAdapters
from rlframe.megatron.memory.quantized import QuantizedWeights
from rlframe.megatron.memory.reference import ReferenceWeights
from rlframe.megatron.messages.chunks import Pieces
from rlframe.megatron.messages.host_room import HostRoom
from rlframe.megatron.messages.microbatch import Microbatch
from rlframe.megatron.messages.moved import Moved
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.megatron.model import forward, model
from rlframe.megatron.model.training_fields import MOMENT_DTYPES
from rlframe.megatron.proof import replicas
from rlframe.megatron.proof.constant import ConstantWeights
from rlframe.megatron.worker import optimizer, overlap, parallel
from rlframe.megatron.worker.expert_load import ExpertLoad, balance
from rlframe.megatron.worker.forward_only import frozen_model
from rlframe.megatron.worker.norms import Norms
from rlframe.megatron.worker.offload import SleepingMemory
from rlframe.megatron.worker.warm_up import leaves_no_trace, warm_up
from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.config import HEAD
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.models.random_init import random_tensor
from rlframe.types.results import Mean, Metric, Peak, UpdateResult, merge
from rlframe.utils.process.memory import available_bytes
from rlframe.weight_sync.adapted import ADAPTERS, BASE
from rlframe.weight_sync.endpoints import WeightSource
from rlframe.weight_sync.layout.memory import MemoryLayout, clear_padding, load_tensor
from rlframe.weight_sync.proof.digest import digest

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers that have the bits of a number, by its bytes."""


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
        architecture = family.architecture(read_config(folder)).with_outputs(setup.num_outputs)
        architecture = architecture.keeping_mtp(setup.train.mtp.keeps)
        self.model = model.build(
            family, architecture, setup.train, device=setup.device, float32_logits=setup.model.float32_logits
        )
        self.model.float32 = setup.float32
        self.layout: MemoryLayout = self.model.layout
        self._load_weights(folder)
        self.reference = self._reference() if setup.with_reference else None
        self.merged: MergedWeights | None = None
        self.sent: SentAdapters | None = None
        self.quantized: dict[EngineFormat, QuantizedWeights] = {}
        if self.model.lora:
            lora_state.fill(self.model.lora, seed=setup.seed)
            if setup.merges:
                self.merged = MergedWeights(self.model.lora, self.model.parameters)
        self._weights_changed()
        self._sources: dict[str, WeightSource] = {}
        self.optimizer = optimizer.build(self.model, setup.train)
        self.expert_load = ExpertLoad(self.model)
        self.norms = Norms(self.model, self.optimizer)
        overlap.prepare(self.model, setup.train)
        moments = MOMENT_DTYPES[setup.train.optimizer.moment_dtype] if setup.train.offload_optimizer else None
        sleeps = setup.train.sleeps
        self.sleeping = SleepingMemory(self.model, self.optimizer, moments=moments) if sleeps else None
        self.staged: Staged | None = None
        self.host_copy = HostMemory(setup.device)
        self.teacher = frozen_model(setup.teacher, setup.train, device=setup.device) if setup.teacher else None
        self.constant = list(self._constant())

    def source(self, channel: str) -> WeightSource:
        """Returns this rank's end of the weight sync of that name."""
        if channel not in self._sources:
            self._sources[channel] = self._source(channel)
        return self._sources[channel]

    def _source(self, channel: str) -> WeightSource:
        if channel.endswith(BASE):
            return WeightSource(self.layout, self.model.parameters)
        if channel.endswith(ADAPTERS):
            assert self.model.lora is not None
            self.sent = self.sent or SentAdapters(self.model.lora)
            return WeightSource(self.sent.layout, self.sent.parameters)
        for each in EngineFormat:
            if each.channel and channel.endswith(each.channel):
                if each not in self.quantized:
                    self.quantized[each] = QuantizedWeights(self.layout, self.weights, each)
                    torch.cuda.synchronize()
                return WeightSource(self.quantized[each].layout, self.quantized[each].parameters)
        return WeightSource(self.layout, self.weights)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights with merged adapters, by canonical name."""
        if self.merged:
            return self.merged.parameters
        return MergedOnDemand(self.model.lora, self.model.parameters) if self.model.lora else self.model.parameters

    @torch.no_grad()
    def _load_weights(self, folder: pathlib.Path) -> None:
        clear_padding(self.layout, self.model.parameters)
        reader = None if self.setup.model.random_init else CheckpointReader(folder)
        for name in self.layout.boxes:
            shape = self.layout.tensors[name]
            if name == HEAD and (reader is None or name not in reader.names):
                # Outputs start at zero: a critic predicts 0, and classes are equally likely.
                value = torch.zeros(shape)
            elif reader is None:
                value = random_tensor(
                    name,
                    shape,
                    zero_centered_norms=self.model.architecture.zero_centered_norms,
                    seed=self.setup.seed,
                    device=str(self.setup.device),
                )
            else:
                value = reader.tensor(name)
            mark(f"loading {name}")
            load_tensor(self.layout, self.model.parameters, name, value)

    def _reference(self) -> ReferenceWeights | WithoutAdapters:
        """Returns the weights as they are now, before any training."""
        lora = self.model.lora
        if lora:
            return WithoutAdapters(lora)
        weights = [*model.parameter_buffers(self.model), *model.routing_biases(self.model)]
        return ReferenceWeights(weights, follows=self.setup.reference_update.every_steps > 0)

    def _constant(self) -> Iterator[ConstantWeights]:
        """Yields the tensors of this rank that nothing trains."""
        if self.reference and not self.following:
            yield ConstantWeights("the reference", self.model, active=self.reference.active)
        elif self.model.lora:
            frozen = self.model.parameters.keys() - self.model.lora.saved.keys()
            base = [name for name, boxes in self.layout.boxes.items() if {box.parameter for box in boxes} <= frozen]
            yield ConstantWeights("the base of the adapters", self.model, names=base)
        if self.model.architecture.with_mtp and not self.model.mtp and not self.model.lora:
            head = [name for name, boxes in self.layout.boxes.items() if all(in_head(box.parameter) for box in boxes)]
            yield ConstantWeights("the head for multi-token prediction", self.model, names=head)
        if self.teacher:
            yield ConstantWeights("the teacher", self.teacher)

    def prove(self) -> None:
        """Compares the copies of trained weights that several ranks hold, and the others with those that were loaded.

        Raises:
            WeightsDrifted: they differ; the message names the tensor and the ranks.
        """
        replicas.require_equal(checkpoint.weights_by_chunk(self.model))
        for weights in self.constant:
            weights.require_unchanged(self.setup.rank)
        for weights in self.quantized.values():
            weights.require_current(self.setup.rank)

    @property
    def following(self) -> ReferenceWeights | None:
        """The reference, if it follows the policy."""
        update = self.setup.reference_update
        return self.reference if update.every_steps and isinstance(self.reference, ReferenceWeights) else None

    def _weights_changed(self) -> None:
        """Updates the weights for engines and exports. Every call that changes weights ends with it."""
        if self.merged:
            self.merged.update()
        if self.sent:
            self.sent.update()
        for weights in self.quantized.values():
            weights.update()
        # Engines read them from their own processes as soon as the call has returned.
        torch.cuda.synchronize()

    def logprobs(
        self, microbatches: list[Microbatch], *, reference: bool, temperature: float | None = None
    ) -> list[Tensor]:
        """Returns [T] nats per micro-batch; empty unless this rank reports. With `reference`, under the frozen weights.

        Args:
            temperature: divisor of the logits; None means that of the setup.
        """
        temperature = self.setup.temperature if temperature is None else temperature
        weights = nullcontext()
        if reference:
            assert self.reference is not None
            weights = self.reference.active()
        with weights:
            return forward.compute_logprobs(self.model, microbatches, temperature=temperature)

    def entropies(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Returns [T] nats per micro-batch at the temperature of the setup; empty unless this rank reports."""
        return forward.compute_entropies(self.model, microbatches, temperature=self.setup.temperature)

    def teacher_logprobs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Returns [T] nats per micro-batch under the teacher, at the policy's temperature; empty unless this rank
        reports."""
        assert self.teacher is not None
        return forward.compute_logprobs(self.teacher, microbatches, temperature=self.setup.temperature)

    def teacher_top(self, microbatches: list[Microbatch], *, k: int, temperature: float) -> list[Tensor]:
        """Returns the teacher's result of `forward.compute_top`. Empty unless this rank reports."""
        assert self.teacher is not None
        return forward.compute_top(self.teacher, microbatches, k=k, temperature=temperature)

    def outputs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Returns [T, C] values or [R, H] states per micro-batch, whichever the model has; empty unless this rank
        reports."""
        return forward.compute_outputs(self.model, microbatches)

    def evaluate(self, microbatches: list[Microbatch], algorithm: Algorithm) -> dict[str, Metric]:
        """Returns the metrics of the loss of one step's micro-batches, merged. Nothing is trained."""
        temperature = self.setup.temperature
        shares = forward.measure(self.model, microbatches, algorithm, temperature=temperature, teacher=self.teacher)
        return merge(shares)

    def fingerprint(self) -> str:
        """Returns 64 hex digits that change with the config.json of the model, with any bit of this rank's weights, and
        with the settings that change its outputs by more than rounding."""
        model, train = self.setup.model, self.setup.train
        identity = {
            "config": read_config(resolve(model)),
            "weights": digest(self.layout, self.model.parameters),
            "computed": [
                self.setup.temperature,
                self.setup.float32,
                model.family,
                model.float32_logits,
                asdict(train.fp8),
                train.moe.router_dtype,
                train.moe.capacity_factor,
            ],
        }
        if lora := self.model.lora:
            identity["adapters"] = digest(lora.layout, lora.parameters)
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @torch.no_grad()
    def negate(self) -> None:
        """Changes the sign of every weight of this rank. A second call undoes it bit for bit. Whoever computes with
        some of the weights of before gets other outputs."""
        for value in self._weights_once():
            value.neg_()
        self._weights_changed()

    @torch.no_grad()
    def flip_last_bits(self) -> None:
        """Changes the last bit of every weight of this rank: the smallest change that its number format has. A second
        call undoes it bit for bit. Outputs change by about as much as rounding changes them."""
        for value in self._weights_once():
            value.view(INTEGERS[value.element_size()]).bitwise_xor_(1)
        self._weights_changed()

    def _weights_once(self) -> list[Tensor]:
        """Returns each weight once: a tied one has two names."""
        return list({value.data_ptr(): value for value in self.model.parameters.values()}.values())

    def train(self, steps: list[list[Microbatch]], algorithm: Algorithm, *, first_step: int) -> list[UpdateResult]:
        """Takes one optimizer step per entry of `steps`. Returns their results.

        Args:
            first_step: number of optimizer steps the run has taken before.
        """
        results = []
        train = self.setup.train
        measured = train.measures_norms(first_step // len(steps) + 1)
        for index, microbatches in enumerate(steps):
            if self.model.lora:
                self.model.lora.seed_dropout(seed=self.setup.seed, step=first_step + index)
            balance(self.model, train.moe, forward.filled(self.model, microbatches))
            self.optimizer.biases.note()
            with overlap.gathering(self.model, when=train.communication.overlap_param_gather and index > 0):
                passes = forward.accumulate_gradients(
                    self.model,
                    microbatches,
                    algorithm,
                    temperature=self.setup.temperature,
                    teacher=self.teacher,
                )
            mark(f"optimizer step {index + 1} of {len(steps)}")
            norms = self.norms.gradient() if measured else {}
            if self.sleeping:
                self.sleeping.before_step()
            updated = optimizer.step(
                self.optimizer,
                train.optimizer,
                step_index=first_step + index,
                total_steps=self.setup.total_optimizer_steps,
                measured=measured,
            )
            skipping = self.optimizer.outliers
            if measured and not self.optimizer.skipped:
                num_steps = first_step + index + 1 - (skipping.skipped if skipping else 0)
                norms |= self.norms.update(num_steps=num_steps)
            metrics = {key: Mean(value, 1.0) for key, value in (updated | norms).items()} | self.expert_load.take()
            metrics |= {"train/skipped_steps": Peak(skipping.skipped)} if skipping else {}
            metrics |= self.model.replay.take() if self.model.replay else {}
            metrics = merge(each.metrics for each in passes) | metrics
            kept = [each.kept_logprobs for each in passes] if self.coordinates.reports else []
            results.append(UpdateResult(metrics=metrics, kept_logprobs=kept))
        overlap.complete(self.model, train)
        if self.following and self.setup.reference_update.due(first_step, len(steps)):
            self.following.follow(self.setup.reference_update.mix)
        self._weights_changed()
        return results

    def warm_up(self) -> None:
        """Runs a small pass, so that the first step need not wait for libraries and kernels. Nothing is trained. Models
        with a head, and those in which a pass would show, are left as they are."""
        architecture = self.model.architecture
        if architecture.num_outputs is None and leaves_no_trace(architecture, self.setup.train):
            self.optimizer.biases.note()
            warm_up(self.model, self.setup.train, temperature=self.setup.temperature)
            self.optimizer.biases.put_back()
            self.expert_load.counts.zero_()
            if self.optimizer.adam:
                self.optimizer.adam.warm_up(MOMENT_DTYPES[self.setup.train.optimizer.moment_dtype])

    def sleep(self) -> Moved:
        """See SleepingMemory."""
        assert self.sleeping is not None
        return self.sleeping.sleep()

    def wake(self) -> Moved:
        """See SleepingMemory."""
        assert self.sleeping is not None
        return self.sleeping.wake()

    def stage(self, folder: pathlib.Path, *, copy: bool) -> None:
        """Plans the files of the training state; see `checkpoint.stage`. `write` and `complete` do the rest."""
        self.staged = checkpoint.stage(
            self.model,
            self.optimizer,
            folder,
            copy_to=self.host_copy if copy else None,
            reference=self.following,
            outliers=self.optimizer.outliers,
        )

    def host_room(self) -> HostRoom:
        """Returns what `stage` needs in host memory to copy the state, and what this host has."""
        needed = checkpoint.state_bytes(self.model, self.optimizer, follows=self.following is not None)
        return HostRoom(needed_bytes=max(0, needed - self.host_copy.num_bytes), free_bytes=available_bytes())

    def reserve_copy(self) -> None:
        """Allocates the pinned host memory that `stage` will need, so that no step waits for it. A CPU needs none."""
        if self.host_copy.pinned:
            self.host_copy.reserve(
                checkpoint.state_bytes(self.model, self.optimizer, follows=self.following is not None)
            )

    def write(self, *, read_back: float = 1.0) -> Written:
        """Writes this rank's file of the staged state, and reads that fraction of it back. It may run during training
        if the state was copied."""
        assert self.staged is not None
        return files.write(self.staged, read_back=read_back)

    def complete(self, written: list[Written]) -> None:
        """Ends a save, with what every rank has written."""
        assert self.staged is not None
        checkpoint.complete(self.staged, written)
        self.staged = None

    def verify(self, folder: pathlib.Path) -> None:
        """Compares this rank's share of the files in `folder` with their checksums."""
        world = Parallel.parse(self.setup.train.parallel).world
        checksums.verify_share(folder, rank=self.setup.rank, world=world)

    def load(self, folder: pathlib.Path, *, num_optimizer_steps: int) -> None:
        """Resumes from the training state in `folder`, saved after `num_optimizer_steps`."""
        checkpoint.load(
            self.model,
            self.optimizer,
            folder,
            num_optimizer_steps=num_optimizer_steps,
            reference=self.following,
            outliers=self.optimizer.outliers,
        )
        self.optimizer.resume()
        self._weights_changed()
        if self.model.architecture.with_mtp:
            # A head that is kept now may have been trained before.
            self.constant = list(self._constant())

    def load_weights(self, folder: pathlib.Path) -> None:
        """Loads the weights of the distributed checkpoint in `folder`, also as those of the reference. Adapters start
        again, as at first."""
        checkpoint.load_weights(self.model, folder)
        self.reference = self._reference() if self.setup.with_reference else None
        if self.model.lora:
            lora_state.fill(self.model.lora, seed=self.setup.seed)
        self.optimizer.reload_model_params()
        self._weights_changed()
        self.constant = list(self._constant())

    def export(self, names: list[str], dtype: torch.dtype) -> Pieces:
        """Returns this rank's pieces of the Hugging Face tensors `names`."""
        return pieces(self.layout, self.weights, names, dtype)

    def adapter_tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor of a PEFT file that this rank holds part of."""
        return self.model.lora.layout.tensors if self.model.lora else {}

    def export_adapter(self, names: list[str], dtype: torch.dtype) -> Pieces:
        """Returns this rank's pieces of the tensors `names` of a PEFT file."""
        assert self.model.lora is not None
        return pieces(self.model.lora.layout, self.model.lora.parameters, names, dtype)


def pieces(layout: MemoryLayout, parameters: Mapping[str, Tensor], names: list[str], dtype: torch.dtype) -> Pieces:
    """Returns a rank's parts of the tensors `names`, on the CPU."""
    return {
        name: [
            (
                tuple(box.region),
                box.view(parameters).to("cpu", model.export_dtype(box.parameter, dtype), copy=True),
            )
            for box in layout.boxes.get(name, ())
        ]
        for name in names
    }
