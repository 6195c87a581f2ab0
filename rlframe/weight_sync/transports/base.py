"""The interface of a transport, and the data that one rank needs to take part in it."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlframe.utils import registry
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.outside import is_outside, load_class
from rlframe.weight_sync.plan.copies import Copies
from rlframe.weight_sync.transports import PACKAGE

FAILED = "failed"
"""Key that the driver sets, in the store at `Link.address`, to release ranks whose peers will not come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Location of a rank of either side."""

    host: str
    """Name of the host. Equal strings mean one host with one process namespace, so that memory can be shared."""
    device: str
    """`cpu`, or the UUID of the GPU that holds its parameters."""
    pid: int

    @property
    def on_cpu(self) -> bool:
        """Returns whether its parameters are in host memory."""
        return self.device == "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One rank's part of the plan. Picklable."""

    transport: str
    """File name of the carrier: shm, cuda_ipc or nccl."""
    rank: int
    """Index of this rank within its side."""
    num_sources: int
    num_destinations: int
    parts: tuple[Copies, ...]
    """This rank's copies, by part: one part if weights go straight into the engine's memory, one per bucket of a
    reload. A destination has the copies it pulls. A source, for two-sided transports, has those it pushes, in the same
    order for each pair of ranks."""
    memories: tuple[Any, ...] = ()
    """Results of `Transport.share` of every source rank, if the transport is one-sided."""
    dtypes: Mapping[str, torch.dtype]
    """Number format in the engines of each tensor they hold."""
    buckets: tuple[tuple[str, ...], ...] = ()
    """For a reload: the whole tensors of each part, in order. Empty if weights go straight into place."""
    address: str = ""
    """Address host:port of the TCPStore at which ranks of two-sided transports connect."""
    session: str = ""
    """Prefix of this connection's keys in that store."""
    chunk_bytes: int = 256 << 20
    """Bound in bytes of a two-sided transport's buffers on each rank, which has two of them."""
    timeout_s: float = 600.0
    """Greatest time in seconds that a rank waits for its peers."""
    units: Mapping[str, int] = field(default_factory=dict)
    """Units of the digests: see `digest.DigestPlan`."""
    seed: int = 0
    """Seed of the digests' keys."""
    owner: str = ""
    """Name of this rank in messages, such as `source rank 3`."""

    @property
    def reloads(self) -> bool:
        """Returns whether whole tensors go through staging memory and the engine's loader."""
        return bool(self.buckets)


class Transport(ABC):
    """One rank's end, on either side. A file of this folder ends `TRANSPORT = TheClass`.

    One-sided transports read the sources' memory from the destination; two-sided ones have `push` called on every
    source rank while `pull` runs on every destination rank.
    """

    two_sided: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def share(parameters: Mapping[str, Tensor]) -> Any:
        """Makes the parameters of the source side readable by other processes, and returns a picklable handle."""

    @staticmethod
    @abstractmethod
    def refusal(source: RankInfo, destination: RankInfo) -> str | None:
        """Returns why this transport cannot carry from `source` to `destination`, as a clause, or None if it can."""

    def open_source(self, parameters: Mapping[str, Tensor], link: Link) -> None:
        """Prepares this source rank. For two-sided transports it connects to the other ranks, which must open at the
        same time."""
        assert not self.two_sided, "a two-sided transport opens its sources"

    @abstractmethod
    def open_destination(self, parameters: Mapping[str, Tensor], link: Link) -> None:
        """Prepares this destination rank to write `link.parts` into `parameters`."""

    def push(self, part: int = 0) -> None:
        """Sends this source rank's pieces of `part` (two-sided transports). When it returns they have left."""
        assert not self.two_sided, "a two-sided transport pushes"

    @abstractmethod
    def pull(self, part: int = 0) -> None:
        """Executes the copies of `part`. When it returns they have arrived.

        Raises:
            WeightSyncFailed: a source is gone, or did not send within the time limit.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases the other ranks' memory, or leaves the group."""


def find_transport(name: str) -> type[Transport]:
    """Returns the transport of file `name`, or the class that `path/to/file.py:Class` or `package.module:Class` names.

    Raises:
        ConfigError: there is no such file or class.
    """
    if is_outside(name):
        return load_class(name, base=registry.BASES[PACKAGE], key="weight_sync.transport")
    if name not in registry.names(PACKAGE):
        known = registry.names(PACKAGE)
        rule, near = f"must be one of {', '.join(known)}", did_you_mean(name, known)
        raise ConfigError([Fault("weight_sync.transport", rule, got=repr(name), hint=near)])
    return importlib.import_module(f"{PACKAGE}.{name}").TRANSPORT
