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
from rlframe.megatron.config.parallel import Parallel
from rlframe.models import shards
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Shard
from rlframe.models.hub import load_family, read_config
from rlframe.models.random_init import random_tensor
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.channel import SourceGroup, WeightSource
from rlframe.weight_sync.layout.memory import clear_padding, load_tensor, record
from rlframe.weight_sync.plan.planner import LinkSpeeds


class SourceWorker(Worker):
    """A trainer rank that only holds parameters."""

    source: WeightSource

    def start(self, model: ModelConfig, own: list[Shard], changes: int) -> float:
        """Random weights of this rank's shards after `changes`, bfloat16, in one buffer on the GPU.

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
            value = random_tensor(name, layout.tensors[name], seed=0, device="cuda")
            load_tensor(layout, parameters, name, value)
        for _ in range(changes):
            self.change()
        self.source = WeightSource(layout, parameters)
        return record_s

    def weights(self, call: RankCall) -> Any:
        """Returns what the WeightSource answers."""
        return call.on(self.source)

    def change(self) -> None:
        """Other weights than before, the same on every replica."""
        self.flat.mul_(1.0078125)
        torch.cuda.synchronize()


class BenchmarkSources(SourceGroup):
    """All trainer ranks."""

    def __init__(self, model: ModelConfig, parallel: Parallel, placement: Placement, logs: Path, *, changes: int):
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
            actor.start.remote(model, shards.shards_of_rank(architecture, rank, **asdict(parallel)), changes)
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

    def change(self) -> None:
        """Other weights than before."""
        self._workers.wait([actor.change.remote() for actor in self._workers.actors], doing="change")

    def stop(self) -> None:
        """End the processes, and wait until their memory is free again."""
        processes = [psutil.Process(info.pid) for info in self._workers.infos if psutil.pid_exists(info.pid)]
        self._workers.stop()
        psutil.wait_procs(processes, timeout=30)


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
