"""What driver and ranks of weight sync say to each other: one Protocol for each side, and its messages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, TypeVarTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlframe.utils.calls import RankCall
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.layout.wire import WireLayout, pack, unpack
from rlframe.weight_sync.transports.base import Link, RankInfo

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo(RankInfo):
    """What the driver asks of a trainer rank."""

    layout: MemoryLayout

    def __reduce__(self) -> tuple[Any, ...]:
        return _info, (type(self), _fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class DestinationInfo(RankInfo):
    """What the driver asks of an engine rank."""

    layout: MemoryLayout | None
    """None when the engine's loader cannot be recorded."""
    refusal: str
    """Why not: a clause whose subject is the engine, such as `keeps model.layers.0.mlp.w13 repacked (FlashInfer)`."""
    can_reload: bool
    """Whether whole tensors can go through the engine's own loader."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of every tensor of the checkpoint."""
    dtype: torch.dtype
    """Number format in which the engine computes."""
    record_s: float | None = None
    """Seconds that recording its loader took; None where it was not timed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _info, (type(self), _fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What one trainer rank holds. [tensors of the layout] each, 0 where it holds nothing."""

    digests: NDArray[np.uint64]
    """Digest shares of the weights, cast to the format the engines hold them in; 0 for what no engine holds."""
    held: NDArray[np.uint64]
    """Digest shares of the weights as they are: of every tensor, in the trainer's own format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """What one engine rank did in one sync."""

    digests: NDArray[np.uint64]
    """[tensors of the layout] digest shares of what it holds now; for a reload of what it handed to the loader."""
    pull_s: float
    verify_s: float
    """Seconds of digests."""
    num_bytes: int
    """Written by the transport."""


class SourceRank(Protocol):
    """What the driver asks of a trainer rank."""

    def describe(self) -> SourceInfo:
        """Returns the recording, and where this rank runs."""
        ...

    def memory(self, transport: str) -> Any:
        """Returns the picklable way into this rank's parameters. `shm` moves them into memory that can be mapped, in
        place."""
        ...

    def connect(self, link: Link) -> None:
        """Takes part in the plan from now on. For a two-sided transport all ranks of both sides connect at once."""
        ...

    def send(self) -> Sent:
        """Digests the present weights. Two-sided transports send them first.

        Raises:
            WeightSyncFailed: two copies of a tied weight differ, or padding is not zero.
        """
        ...

    def digests(self) -> Sent:
        """Answers as `send` does, and sends nothing."""
        ...

    def box_digests(self, tensor: str, regions: Sequence[Region], dtype: torch.dtype) -> dict[Region, int]:
        """Returns the digest of those `regions` of `tensor` that this rank holds."""
        ...

    def close(self) -> None:
        """Leaves the group of the transport, where there is one."""
        ...


class DestinationRank(Protocol):
    """What the driver asks of an engine rank."""

    def describe(self) -> DestinationInfo:
        """Returns the recording, and where this rank runs."""
        ...

    def connect(self, link: Link) -> None:
        """Opens the way to the sources. For a two-sided transport all ranks of both sides connect at once."""
        ...

    def receive(self) -> Received:
        """Pulls every piece, then digests what this rank's own memory holds."""
        ...

    def digests(self) -> NDArray[np.uint64]:
        """Returns [tensors of the layout] digest shares of what this rank holds; after a reload, of what it handed over
        last.

        Raises:
            WeightSyncFailed: a reload was cut short, so that what the engine holds is unknown; or padding is not zero.
        """
        ...

    def box_digests(self, tensor: str, regions: Sequence[Region]) -> dict[Region, int]:
        """Returns the digest of those `regions` of `tensor` that this rank holds; none for a reload, which has moved
        on."""
        ...

    def snapshot(self) -> dict[str, int]:
        """Digests each of this rank's own parameters, as they lie in memory, if digests know its number format. For
        engines that take reloads, whose parameters are their loader's own business."""
        ...

    def clear_padding(self) -> None:
        """Zeroes what no tensor fills."""
        ...

    def close(self) -> None:
        """Lets go of the sources' memory."""
        ...


class SourceGroup(ABC):
    """All source ranks as the driver sees them. Lists are by rank."""

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """Source ranks there are."""

    @abstractmethod
    def on_ranks(self, calls: Sequence[RankCall[SourceRank, T]]) -> list[T]:
        """Returns what each rank answers to its own call, all of them at once."""

    def call(self, method: Callable[[SourceRank, *Ts], T], *arguments: *Ts) -> list[T]:
        """Returns what each rank answers to the same call."""
        return self.on_ranks([RankCall.of(method, *arguments)] * self.num_ranks)


class DestinationGroup(ABC):
    """All ranks of all engines as the driver sees them. Lists are by destination rank."""

    @abstractmethod
    def engines(self) -> list[int]:
        """Number of the engine each rank belongs to; every engine holds the whole model."""

    @abstractmethod
    def on_ranks(
        self, calls: Sequence[RankCall[DestinationRank, T]], *, engines: Sequence[int] | None = None
    ) -> list[T]:
        """Returns what each rank answers to its own call, all of them at once.

        Args:
            calls: for each rank of `engines`, in order.
            engines: only the ranks of these, all when None.
        """

    def call(
        self, method: Callable[[DestinationRank, *Ts], T], *arguments: *Ts, engines: Sequence[int] | None = None
    ) -> list[T]:
        """Returns what each rank of `engines`, of all when None, answers to the same call."""
        num_ranks = sum(engines is None or engine in engines for engine in self.engines())
        return self.on_ranks([RankCall.of(method, *arguments)] * num_ranks, engines=engines)

    @abstractmethod
    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:
        """Closes the engines' gates, pauses what runs, and calls `WeightDestination.receive` on every rank at once."""

    @abstractmethod
    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        """`version` is proved: opens the gates, and what was paused goes on."""

    @abstractmethod
    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        """The engines' weights are unverified: their gates refuse with `reason`. Dead engines are passed over."""

    def revive(self) -> list[int]:
        """Starts engines that died anew, with the initial checkpoint, and returns their numbers; none where the group
        does not do that.

        Raises:
            WorkerDied: it was one death too many.
        """
        return []


def _fields(info: SourceInfo | DestinationInfo) -> dict[str, Any]:
    """For pickling: the layout as arrays."""
    values = {field.name: getattr(info, field.name) for field in fields(info)}
    if info.layout is not None:
        values["layout"] = pack(info.layout)
    return values


def _info(kind: type[RankInfo], values: dict[str, Any]) -> RankInfo:
    """From what `_fields` gave."""
    if isinstance(values["layout"], WireLayout):
        values["layout"] = unpack(values["layout"])
    return kind(**values)
