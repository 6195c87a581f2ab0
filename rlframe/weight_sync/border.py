"""The calls between the driver and the ranks of weight sync: one Protocol for each side, and its messages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar, TypeVarTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlframe.utils.calls import RankCall
from rlframe.utils.process.memory import MemoryUse
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.layout.wire import PackedLayout, pack, unpack
from rlframe.weight_sync.transports.base import Link, RankInfo

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo(RankInfo):
    """A trainer rank's answer to `describe`."""

    layout: MemoryLayout

    def __reduce__(self) -> tuple[Any, ...]:
        return _info, (type(self), _fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class DestinationInfo(RankInfo):
    """An engine rank's answer to `describe`."""

    layout: MemoryLayout | None
    """Layout of the engine's memory. None if the engine's loader cannot be recorded."""
    refusal: str
    """Reason why there is no layout, as a clause whose subject is the engine, such as `keeps model.layers.0.mlp.w13
    repacked (FlashInfer)`."""
    can_reload: bool
    """Whether whole tensors can go through the engine's own loader."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of every tensor of the checkpoint."""
    dtype: torch.dtype
    """Number format in which the engine computes."""
    formats: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Number formats of tensors that the engine holds in more digits than that, as far as they are known."""
    received: bool = False
    """Whether weights have been sent to it since it was started."""
    unseen: tuple[str, ...] = ()
    """Names of the rank's own parameters that `snapshot` leaves out."""
    record_s: float | None = None
    """Seconds of recording its loader. None if not measured."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _info, (type(self), _fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Digests of one trainer rank: [tensors of the layout] each, 0 for tensors it does not hold."""

    digests: NDArray[np.uint64]
    """Digest shares of the weights, cast to the number format of the engines. 0 for tensors that no engine holds."""
    held: NDArray[np.uint64]
    """Digest shares of the uncast weights: of every tensor, in the trainer's own format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """An engine rank's report of one sync."""

    digests: NDArray[np.uint64]
    """[tensors of the layout] digest shares of its present memory; for a reload, of the tensors it passed to the
    loader."""
    pull_s: float
    verify_s: float
    """Seconds of computing digests."""
    num_bytes: int
    """Bytes written by the transport."""
    memory: MemoryUse
    """Memory of the rank's process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A trainer rank's copy of its weights in host memory."""

    memory: Any
    """Picklable handle with which processes of the same host map it."""
    num_bytes: int
    seconds: float
    """Seconds of copying."""


class SourceRank(Protocol):
    """The driver's calls to a trainer rank."""

    def warm_up(self) -> None:
        """Compiles what a sync needs on a GPU. `connect` does without it."""
        ...

    def describe(self) -> SourceInfo:
        """Returns the recording and the location of this rank."""
        ...

    def memory(self, transport: str) -> Any:
        """Returns the picklable handle of this rank's parameters. `shm` moves them in place into memory that can be
        mapped."""
        ...

    def connect(self, link: Link) -> None:
        """Prepares this rank's part of the plan. For a two-sided transport all ranks of both sides must connect at
        once."""
        ...

    def send(self) -> Sent:
        """Digests the present weights. Two-sided transports send them first.

        Raises:
            WeightSyncFailed: two copies of a tied weight differ, or padding is not zero.
        """
        ...

    def digests(self) -> Sent:
        """Returns the same digests as `send`, and sends nothing."""
        ...

    def box_digests(self, tensor: str, regions: Sequence[Region], dtype: torch.dtype) -> dict[Region, int]:
        """Returns the digest of the `regions` of `tensor` that this rank holds."""
        ...

    def hold(self, parameters: Sequence[str]) -> Held:
        """Copies the present weights of these parameters into host memory, in the place of the copy before."""
        ...

    def close(self) -> None:
        """Leaves the group of the transport, if there is one."""
        ...


class DestinationRank(Protocol):
    """The driver's calls to an engine rank."""

    def describe(self) -> DestinationInfo:
        """Returns the recording and the location of this rank."""
        ...

    def connect(self, link: Link) -> None:
        """Connects to the sources. For a two-sided transport all ranks of both sides must connect at once."""
        ...

    def receive(self) -> Received:
        """Pulls every piece, then digests this rank's own memory."""
        ...

    def digests(self) -> NDArray[np.uint64]:
        """Returns [tensors of the layout] digest shares of this rank's memory; after a reload, of the tensors it last
        passed to the loader.

        Raises:
            WeightSyncFailed: a reload was interrupted, so that the engine's weights are unknown; or padding is not
                zero.
        """
        ...

    def box_digests(self, tensor: str, regions: Sequence[Region]) -> dict[Region, int]:
        """Returns the digest of the `regions` of `tensor` that this rank holds. Empty for a reload, whose tensors are
        gone."""
        ...

    def snapshot(self) -> dict[str, int]:
        """Digests each of this rank's own parameters, as they lie in memory, but those of DestinationInfo.unseen. It is
        for engines that take reloads, whose loader decides about their parameters."""
        ...

    def disturb(self) -> str:
        """Changes one bit of this rank's weights until the next sync, so that proofs can be tested. Returns the name of
        the tensor."""
        ...

    def clear_padding(self) -> None:
        """Zeroes the padding that no tensor fills."""
        ...

    def close(self) -> None:
        """Releases the sources' memory."""
        ...


class SourceGroup(ABC):
    """All source ranks as seen by the driver. Lists are by rank."""

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """Number of source ranks."""

    @abstractmethod
    def on_ranks(self, calls: Sequence[RankCall[SourceRank, T]]) -> list[T]:
        """Makes a call on each rank, all at once, and returns the answers."""

    def call(self, method: Callable[[SourceRank, *Ts], T], *arguments: *Ts) -> list[T]:
        """Makes the same call on each rank and returns the answers."""
        return self.on_ranks([RankCall.of(method, *arguments)] * self.num_ranks)


class DestinationGroup(ABC):
    """All ranks of all engines as seen by the driver. Lists are by destination rank."""

    @abstractmethod
    def engines(self) -> list[int]:
        """Returns the index of each rank's engine. Every engine holds the whole model."""

    @abstractmethod
    def on_ranks(
        self, calls: Sequence[RankCall[DestinationRank, T]], *, engines: Sequence[int] | None = None
    ) -> list[T]:
        """Makes a call on each rank, all at once, and returns the answers.

        Args:
            calls: for each rank of `engines`, in order.
            engines: engines whose ranks are called; None means all.
        """

    def call(
        self, method: Callable[[DestinationRank, *Ts], T], *arguments: *Ts, engines: Sequence[int] | None = None
    ) -> list[T]:
        """Makes the same call on each rank of `engines`, or of all if that is None, and returns the answers."""
        num_ranks = sum(engines is None or engine in engines for engine in self.engines())
        return self.on_ranks([RankCall.of(method, *arguments)] * num_ranks, engines=engines)

    @abstractmethod
    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:
        """Closes the engines' gates, pauses running requests, and calls `WeightDestination.receive` on every rank at
        once."""

    @abstractmethod
    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        """Opens the gates after `version` is proved, and lets paused requests continue."""

    @abstractmethod
    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        """Marks the engines' weights as unverified, so that their gates refuse requests with `reason`. Skips dead
        engines."""

    def revive(self) -> list[int]:
        """Restarts dead engines with the initial checkpoint, and returns their indices. Empty if the group does not
        restart engines.

        Raises:
            WorkerDied: no restart is left.
        """
        return []


def _fields(info: SourceInfo | DestinationInfo) -> dict[str, Any]:
    """Returns the fields for pickling, with the layout as arrays, and shapes only once."""
    values = {field.name: getattr(info, field.name) for field in fields(info)}
    if info.layout is not None:
        values["layout"] = pack(info.layout)
        if values.get("tensors") == info.layout.tensors:
            values["tensors"] = None
    return values


def _info(kind: type[RankInfo], values: dict[str, Any]) -> RankInfo:
    """Returns the message from the result of `_fields`."""
    if isinstance(values["layout"], PackedLayout):
        values["layout"] = unpack(values["layout"])
        if "tensors" in values and values["tensors"] is None:
            values["tensors"] = values["layout"].tensors
    return kind(**values)
