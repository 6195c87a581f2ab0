"""Source and destination groups inside the test process, which weight sync drives like groups of Ray actors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlframe.weight_sync.boxes import Region
from rlframe.weight_sync.channel import DestinationGroup, SourceGroup, WeightDestination, WeightSource
from rlframe.weight_sync.layout import Layout
from rlframe.weight_sync.plan import Copy


class LocalSources(SourceGroup):
    """Trainer ranks as plain objects."""

    def __init__(self, ranks: list[WeightSource]):
        self.ranks = ranks

    def layouts(self) -> list[Layout]:
        return [rank.layout for rank in self.ranks]

    def hosts(self) -> list[str]:
        return ["here"] * len(self.ranks)

    def memories(self, transport: str) -> list[Any]:
        return [rank.memory(transport) for rank in self.ranks]

    def digests(self, dtypes: Mapping[str, torch.dtype]) -> list[dict[str, int]]:
        return [rank.digests(dtypes) for rank in self.ranks]

    def box_digests(self, tensor: str, regions: Sequence[Region], dtype: torch.dtype) -> list[dict[Region, int]]:
        return [rank.box_digests(tensor, regions, dtype) for rank in self.ranks]


class LocalDestinations(DestinationGroup):
    """Engine ranks as plain objects, one list of ranks per engine."""

    def __init__(self, engines: list[list[WeightDestination]]):
        self._engines = [index for index, ranks in enumerate(engines) for _ in ranks]
        self.ranks = [rank for ranks in engines for rank in ranks]

    def engines(self) -> list[int]:
        return self._engines

    def layouts(self) -> list[Layout]:
        return [rank.layout for rank in self.ranks]

    def hosts(self) -> list[str]:
        return ["here"] * len(self.ranks)

    def connect(self, copies: Sequence[Sequence[Copy]], memories: Sequence[Any], transport: str) -> None:
        for rank, mine in zip(self.ranks, copies, strict=True):
            rank.connect(mine, memories, transport)

    def begin(self, version: int) -> None:
        for rank in self.ranks:
            rank.begin(version)

    def pull(self) -> None:
        for rank in self.ranks:
            rank.pull()

    def commit(self, version: int) -> None:
        for rank in self.ranks:
            rank.commit(version)

    def digests(self) -> list[dict[str, int]]:
        return [rank.digests() for rank in self.ranks]

    def box_digests(self, tensor: str, regions: Sequence[Region]) -> list[dict[Region, int]]:
        return [rank.box_digests(tensor, regions) for rank in self.ranks]
