"""Source and destination groups inside the test process, which weight sync drives like groups of Ray actors."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import DestinationGroup, Received, Reload, SourceGroup, WeightDestination, WeightSource
from rlframe.weight_sync.layout.memory import MemoryLayout


def destination(
    layout: MemoryLayout | None,
    parameters: dict[str, Tensor],
    *,
    tensors: dict[str, tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    formats: dict[str, torch.dtype] | None = None,
    refusal: str = "",
    reload: Reload | None = None,
) -> WeightDestination:
    """An engine rank on the CPU."""
    shapes = tensors if layout is None else layout.tensors
    assert shapes is not None
    device = torch.device("cpu")
    return WeightDestination(
        layout,
        parameters,
        tensors=shapes,
        dtype=dtype,
        device=device,
        formats=formats,
        refusal=refusal,
        reload=reload,
    )


def at_once(ranks: Sequence[Any], calls: Sequence[RankCall]) -> list[Any]:
    """The call of every rank, in threads: the ranks of a two-sided transport wait for each other."""
    with ThreadPoolExecutor(max_workers=max(1, len(ranks))) as pool:
        answers = [pool.submit(call.on, rank) for rank, call in zip(ranks, calls, strict=True)]
    return [answer.result() for answer in answers]


class LocalSources(SourceGroup):
    """Trainer ranks as plain objects."""

    def __init__(self, ranks: list[WeightSource]):
        self.ranks = ranks

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def on_ranks(self, calls: Sequence[RankCall]) -> list[Any]:
        return at_once(self.ranks, calls)


class LocalDestinations(DestinationGroup):
    """Engine ranks as plain objects, one list of ranks per engine, with a gate per engine."""

    def __init__(self, engines: list[list[WeightDestination]]):
        self._engines = [index for index, ranks in enumerate(engines) for _ in ranks]
        self.ranks = [rank for ranks in engines for rank in ranks]
        self.gates: dict[int, int | str | None] = dict.fromkeys(self._engines)
        """By engine: the verified version, None while there is none, or why the sync failed."""

    def engines(self) -> list[int]:
        return self._engines

    def on_ranks(self, calls: Sequence[RankCall], *, engines: Sequence[int] | None = None) -> list[Any]:
        return at_once([self.ranks[rank] for rank in self._ranks(engines)], calls)

    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:
        self.gates.update(dict.fromkeys(self._chosen(engines)))
        return self.call(DestinationRank.receive, engines=engines)

    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        self.gates.update(dict.fromkeys(self._chosen(engines), version))

    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        self.gates.update(dict.fromkeys(self._chosen(engines), reason))

    def _chosen(self, engines: Sequence[int] | None) -> list[int]:
        return [engine for engine in self.gates if engines is None or engine in engines]

    def _ranks(self, engines: Sequence[int] | None) -> list[int]:
        return [rank for rank, engine in enumerate(self._engines) if engines is None or engine in engines]
