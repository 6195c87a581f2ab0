"""Chooses the transport of the weights from the locations of the processes and the abilities of the engines, with the
reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlframe.utils import registry
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationInfo, SourceInfo
from rlframe.weight_sync.transports import PACKAGE
from rlframe.weight_sync.transports.base import RankInfo, find_transport

RELOAD = "reload"
ORDER = ("shm", "cuda_ipc", "nccl")
"""Carriers from the best to the one that reaches farthest."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen transport."""

    carrier: str
    """File name of the transport."""
    reloads: bool
    """Whether whole tensors go through the engines' own loader."""
    reason: str

    @property
    def name(self) -> str:
        """Name of the transport, such as `shm`, or `reload over shm`."""
        return f"{RELOAD} over {self.carrier}" if self.reloads else self.carrier

    def __str__(self) -> str:
        return f"transport {self.name}: {self.reason}"


def choose(
    sources: Sequence[SourceInfo], destinations: Sequence[DestinationInfo], engines: Sequence[int], wish: str = "auto"
) -> Choice:
    """Returns the transport to use.

    Args:
        engines: index of each destination rank's engine.
        wish: `auto`, `reload` or the name of a carrier.

    Raises:
        WeightSyncFailed: the requested transport is unavailable, or none is; the message gives the reason.
    """
    refusals = [
        f"engine {engine} {rank.refusal}" for engine, rank in zip(engines, destinations, strict=True) if not rank.layout
    ]
    if wish == RELOAD or (wish == "auto" and refusals):
        carrier, reason = _carrier(sources, destinations, ORDER)
        if unable := [engine for engine, rank in zip(engines, destinations, strict=True) if not rank.can_reload]:
            why = f", and {refusals[0]}" if refusals else ""
            raise WeightSyncFailed(
                f"transport reload needs an engine's own loader, but engine {unable[0]} has none{why}"
            )
        return Choice(carrier, True, refusals[0] if refusals else f"requested; {reason}")
    if refusals:
        raise WeightSyncFailed(
            f"weight_sync.transport={wish} is not possible: {refusals[0]}; set weight_sync.transport=reload"
        )
    if wish != "auto":
        if refusal := _refusal(wish, sources, destinations):
            raise WeightSyncFailed(f"weight_sync.transport={wish} is not possible: {refusal}")
        return Choice(wish, False, "asked for")
    carrier, reason = _carrier(sources, destinations, ORDER)
    return Choice(carrier, False, reason)


def _carrier(sources: Sequence[RankInfo], destinations: Sequence[RankInfo], order: Sequence[str]) -> tuple[str, str]:
    """Returns (the first transport that reaches every destination from every source, the reason for it)."""
    ranks = [*sources, *destinations]
    hosts = {rank.host for rank in ranks}
    passed = []
    for name in order:
        if name not in registry.names(PACKAGE):
            continue
        refusal = _refusal(name, sources, destinations)
        if refusal is None:
            if len(hosts) == 1 and all(rank.on_cpu for rank in ranks):
                place = "on the CPU of one host"
            elif len(hosts) == 1:
                place = f"on one host with {len({rank.device for rank in ranks})} GPUs"
            else:
                place = f"on {len(hosts)} hosts"
            # Omit shm from the explanation: it never applies to GPUs.
            why = [clause for clause in passed if not clause.startswith("shm ")]
            return name, "; ".join([f"every rank is {place}" if len(hosts) == 1 else f"ranks are {place}", *why])
        passed.append(refusal)
    raise WeightSyncFailed(f"no transport reaches the engines: {'; '.join(passed)}")


def _refusal(name: str, sources: Sequence[RankInfo], destinations: Sequence[RankInfo]) -> str | None:
    """Returns why `name` cannot carry between some pair of ranks."""
    transport = find_transport(name)
    shared = Counter((rank.host, rank.device) for rank in destinations if not rank.on_cpu)
    if transport.two_sided and max(shared.values(), default=1) > 1:
        return (
            f"{name} has one rank on a GPU, and {max(shared.values())} engines share one (rollout.engines_per_device)"
        )
    seen = set()
    for source in sources:
        for destination in destinations:
            if (source.host, source.device, destination.host, destination.device) in seen:
                continue
            seen.add((source.host, source.device, destination.host, destination.device))
            if refusal := transport.refusal(source, destination):
                return refusal
    return None
