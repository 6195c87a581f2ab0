"""The two ends of weight sync inside the worker processes, and what the driver sees of all of them together."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Region
from rlframe.weight_sync.digest import digest, region_digests
from rlframe.weight_sync.layout import Layout
from rlframe.weight_sync.plan import Copy
from rlframe.weight_sync.transports.base import Transport, find_transport


class WeightSource:
    """One trainer rank's end: shows its memory and answers for its content."""

    def __init__(self, layout: Layout, parameters: Mapping[str, Tensor]):
        self.layout = layout
        self._parameters = parameters

    def memory(self, transport: str) -> Any:
        """The picklable way into this rank's parameters. `shm` moves them into memory that can be mapped, in place."""
        return find_transport(transport).share(self._parameters)

    def digests(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
        """This rank's digest share of each tensor, cast to the format the engines hold it in."""
        return digest(self.layout, self._parameters, dtypes=dtypes)

    def box_digests(self, tensor: str, regions: Sequence[Region], dtype: torch.dtype) -> dict[Region, int]:
        """Digest of those `regions` of `tensor` that this rank holds."""
        return region_digests(self.layout.boxes.get(tensor, ()), self._parameters, regions, dtype=dtype)


class WeightDestination:
    """One engine rank's end: pulls, answers for what it holds, and knows whether that was verified."""

    def __init__(self, layout: Layout, parameters: Mapping[str, Tensor]):
        self.layout = layout
        self.version: int | None = None
        """Version the memory holds or is about to hold; None before the first."""
        self.verified = False
        """True when the driver has proved that the memory holds `version`."""
        self._parameters = parameters
        self._transport: Transport | None = None

    def connect(self, copies: Sequence[Copy], memories: Sequence[Any], transport: str) -> None:
        """Opens the memories of the source ranks that these copies read.

        Args:
            memories: `WeightSource.memory` of every source rank.
        """
        self.close()
        self._transport = find_transport(transport)()
        self._transport.connect(self._parameters, copies, memories)

    def begin(self, version: int) -> None:
        """From here until `commit` the weights count as unverified."""
        self.version, self.verified = version, False

    def pull(self) -> None:
        """Carries out the copies."""
        assert self._transport is not None, "connect before pull"
        self._transport.pull()

    def commit(self, version: int) -> None:
        """The driver has proved that the memory holds `version`."""
        assert version == self.version, f"commit of version {version} after begin of {self.version}"
        self.verified = True

    def digests(self) -> dict[str, int]:
        """This rank's digest share of each tensor, from its own memory."""
        return digest(self.layout, self._parameters)

    def box_digests(self, tensor: str, regions: Sequence[Region]) -> dict[Region, int]:
        """Digest of those `regions` of `tensor` that this rank holds."""
        return region_digests(self.layout.boxes.get(tensor, ()), self._parameters, regions)

    def require_verified(self) -> None:
        """Raises WeightSyncFailed unless the weights are proved to be those of `version`; to call before sampling."""
        if not self.verified:
            raise WeightSyncFailed(f"engine holds weights of version {self.version} that are not verified")

    def close(self) -> None:
        """Lets go of the sources' memory."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None


class SourceGroup(ABC):
    """All source ranks as the driver sees them. Lists are by rank."""

    @abstractmethod
    def layouts(self) -> list[Layout]:
        """What each rank holds."""

    @abstractmethod
    def hosts(self) -> list[str]:
        """Host of each rank; equal strings mean shared memory."""

    @abstractmethod
    def memories(self, transport: str) -> list[Any]:
        """`WeightSource.memory` of each rank."""

    @abstractmethod
    def digests(self, dtypes: Mapping[str, torch.dtype]) -> list[dict[str, int]]:
        """`WeightSource.digests` of each rank."""

    @abstractmethod
    def box_digests(self, tensor: str, regions: Sequence[Region], dtype: torch.dtype) -> list[dict[Region, int]]:
        """`WeightSource.box_digests` of each rank."""


class DestinationGroup(ABC):
    """All ranks of all engines as the driver sees them. Lists are by destination rank."""

    @abstractmethod
    def engines(self) -> list[int]:
        """Number of the engine each rank belongs to; every engine holds the whole model."""

    @abstractmethod
    def layouts(self) -> list[Layout]:
        """What each rank holds."""

    @abstractmethod
    def hosts(self) -> list[str]:
        """Host of each rank."""

    @abstractmethod
    def connect(self, copies: Sequence[Sequence[Copy]], memories: Sequence[Any], transport: str) -> None:
        """`WeightDestination.connect` on each rank.

        Args:
            copies: of each destination rank.
            memories: of each source rank.
        """

    @abstractmethod
    def begin(self, version: int) -> None:
        """`WeightDestination.begin` on each rank."""

    @abstractmethod
    def pull(self) -> None:
        """`WeightDestination.pull` on each rank, at the same time."""

    @abstractmethod
    def commit(self, version: int) -> None:
        """`WeightDestination.commit` on each rank."""

    @abstractmethod
    def digests(self) -> list[dict[str, int]]:
        """`WeightDestination.digests` of each rank."""

    @abstractmethod
    def box_digests(self, tensor: str, regions: Sequence[Region]) -> list[dict[Region, int]]:
        """`WeightDestination.box_digests` of each rank."""
