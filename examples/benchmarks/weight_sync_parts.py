"""What `weight_sync.py` measures with: models by their dimensions, trainer ranks without a trainer, and the floors."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from rlframe.cluster.placement import Placement
from rlframe.cluster.worker import Worker
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.memory.quantized import QuantizedWeights
from rlframe.models import shards
from rlframe.models.adapters import key
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Shard
from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.models.random_init import random_tensor
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.channel import SourceGroup, WeightSource
from rlframe.weight_sync.layout.memory import clear_padding, identity_layout, load_tensor, record
from rlframe.weight_sync.plan.planner import LinkSpeeds


class SourceWorker(Worker):
    """A trainer rank that only holds parameters."""

    source: WeightSource
    adapters: WeightSource

    def start(
        self,
        model: ModelConfig,
        own: list[Shard],
        changes: int,
        lora: LoraConfig | None,
        engine_format: EngineFormat,
    ) -> float:
        """Random weights of this rank's shards after `changes`, bfloat16, in one buffer on the GPU, and what engines of
        `engine_format` get of them. With `lora` also whole random adapters, which are then what changes.

        Returns seconds that recording took.
        """
        folder = Path(model.path)
        family = load_family(folder)
        architecture = family.architecture(read_config(folder))
        shapes = shards.parameters(family, architecture, own)
        # Starts at multiples of 256 bytes, as torch's own allocations and Megatron's buffers do.
        sizes = {name: -(-torch.Size(shape).numel() // 128) * 128 for name, shape in shapes.items()}
        self.flat = torch.empty(sum(sizes.values()), dtype=torch.bfloat16, device="cuda")
        parts = dict(zip(sizes, self.flat.split(list(sizes.values())), strict=True))
        parameters = {name: parts[name][: torch.Size(shape).numel()].view(shape) for name, shape in shapes.items()}
        twins = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
        load = partial(shards.load, family=family, architecture=architecture, shards=own)
        begun = time.perf_counter()
        layout = record(load, twins, family.tensors(architecture))
        record_s = time.perf_counter() - begun
        clear_padding(layout, parameters)
        for name in layout.boxes:
            centered = architecture.zero_centered_norms
            value = random_tensor(name, layout.tensors[name], zero_centered_norms=centered, seed=0, device="cuda")
            load_tensor(layout, parameters, name, value)
        if lora is not None:
            self.adapters = self.make_adapters(adapter_of(model, lora))
        self.quantized: QuantizedWeights | None = None
        for _ in range(changes if lora is None else 0):
            self.change()
        self.source = WeightSource(layout, parameters)
        if engine_format is not EngineFormat.NONE:
            self.quantized = QuantizedWeights(layout, parameters, engine_format)
            self.source = WeightSource(self.quantized.layout, self.quantized.parameters)
        return record_s

    def make_adapters(self, adapter: EngineAdapter) -> WeightSource:
        """Random A and B in one buffer, which `change` changes from now on."""
        sizes = {name: torch.Size(shape).numel() for name, shape in adapter.tensors.items()}
        self.flat = torch.randn(sum(sizes.values()), dtype=torch.bfloat16, device="cuda") * 0.01
        parts = zip(adapter.tensors.items(), self.flat.split(list(sizes.values())), strict=True)
        held = {name: part.view(shape) for (name, shape), part in parts}
        return WeightSource(identity_layout(held), held)

    def weights(self, call: RankCall) -> Any:
        """Returns what the WeightSource answers."""
        return call.on(self.source)

    def adapter_weights(self, call: RankCall) -> Any:
        """Returns what the WeightSource of the adapters answers."""
        return call.on(self.adapters)

    def change(self) -> float:
        """Other weights than before, the same on every replica. Returns seconds of quantising them."""
        self.flat.mul_(1.0078125)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        if self.quantized:
            self.quantized.update()
            torch.cuda.synchronize()
        return time.perf_counter() - begun


class BenchmarkSources(SourceGroup):
    """All trainer ranks."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: Parallel,
        placement: Placement,
        logs: Path,
        *,
        changes: int,
        lora: LoraConfig | None = None,
        engine_format: EngineFormat = EngineFormat.NONE,
    ):
        folder = Path(model.path)
        architecture = load_family(folder).architecture(read_config(folder))
        self._workers = WorkerGroup(
            SourceWorker,
            role="source",
            slots=placement.policy[: parallel.world],
            log_folder=str(logs),
            num_threads=4,
            start_timeout_s=300,
            call_timeout_s=600,
        )
        calls = [
            actor.start.remote(
                model, shards.shards_of_rank(architecture, rank, **asdict(parallel)), changes, lora, engine_format
            )
            for rank, actor in enumerate(self._workers.actors)
        ]
        self.record_s: list[float] = self._workers.wait(calls, doing="start")
        """Of each rank."""

    @property
    def num_ranks(self) -> int:
        """See SourceGroup."""
        return len(self._workers.actors)

    def on_ranks(self, calls: Sequence[RankCall]) -> list[Any]:
        """See SourceGroup."""
        asked = [actor.weights.remote(call) for actor, call in zip(self._workers.actors, calls, strict=True)]
        return self._workers.wait(asked, doing=str(calls[0]))

    def adapters(self) -> "AdapterSources":
        """Returns the source of the adapters."""
        return AdapterSources(self)

    def on_adapters(self, calls: Sequence[RankCall]) -> list[Any]:
        """Makes a call about each rank's adapters."""
        asked = [actor.adapter_weights.remote(call) for actor, call in zip(self._workers.actors, calls, strict=True)]
        return self._workers.wait(asked, doing=str(calls[0]))

    def change(self) -> float:
        """Other weights than before. Returns the slowest rank's seconds of quantising them."""
        return max(self._workers.wait([actor.change.remote() for actor in self._workers.actors], doing="change"))

    def stop(self) -> None:
        """End the processes, and wait until their memory is free again."""
        processes = [psutil.Process(info.pid) for info in self._workers.infos if psutil.pid_exists(info.pid)]
        self._workers.stop()
        psutil.wait_procs(processes, timeout=30)


class AdapterSources(SourceGroup):
    """The adapters of all trainer ranks."""

    def __init__(self, sources: BenchmarkSources):
        self._sources = sources

    @property
    def num_ranks(self) -> int:
        """See SourceGroup."""
        return self._sources.num_ranks

    def on_ranks(self, calls: Sequence[RankCall]) -> list[Any]:
        """See SourceGroup."""
        return self._sources.on_adapters(calls)


def adapter_of(model: ModelConfig, lora: LoraConfig) -> EngineAdapter:
    """The adapters of every matrix of attention and MLP of a dense model."""
    folder = Path(model.path)
    family = load_family(folder)
    shapes = family.tensors(family.architecture(read_config(folder)))
    matrices = [(name, shape) for name, shape in shapes.items() if name.endswith("_proj.weight")]
    tensors = {key(name, "lora_A"): (lora.rank, shape[1]) for name, shape in matrices}
    tensors |= {key(name, "lora_B"): (shape[0], lora.rank) for name, shape in matrices}
    return EngineAdapter(rank=lora.rank, tensors=dict(sorted(tensors.items())))


def floors() -> LinkSpeeds:
    """GB/s of plain copies: within the first GPU, and from the second to the first."""
    source = torch.empty(1 << 32, dtype=torch.int8, device="cuda:0").random_()
    target = torch.empty_like(source)
    speeds = LinkSpeeds(device=copy_speed(target, source))
    if torch.cuda.device_count() > 1:
        speeds = replace(speeds, peer=copy_speed(target, source.to("cuda:1")))
    del source, target
    torch.cuda.empty_cache()
    return speeds


def copy_speed(target: torch.Tensor, source: torch.Tensor, repeats: int = 7) -> float:
    """Payload GB/s of `target.copy_(source)`, median."""
    seconds = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize(0)
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        seconds.append(time.perf_counter() - begun)
    return source.numel() / statistics.median(seconds[2:]) / 1e9
