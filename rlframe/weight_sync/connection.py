"""The data of a set of connected processes: transport, plan, links, and the holders of each tensor."""

from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import TCPStore

from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed, WorkerDied
from rlframe.utils.process.rendezvous import listen
from rlframe.weight_sync.border import (
    DestinationGroup,
    DestinationInfo,
    DestinationRank,
    Sent,
    SourceGroup,
    SourceInfo,
    SourceRank,
)
from rlframe.weight_sync.choice import Choice, choose
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.endpoints import this_host
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.layout.wire import no_collection
from rlframe.weight_sync.plan.copies import Copies
from rlframe.weight_sync.plan.planner import Plan, make_plan
from rlframe.weight_sync.proof.digest import common_units
from rlframe.weight_sync.proof.shares import Shares, cover
from rlframe.weight_sync.reload import make_buckets, part_of, staging_layout
from rlframe.weight_sync.transports.base import FAILED, Link, find_transport

T = TypeVar("T")
U = TypeVar("U")
Digests = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Trainer and engines in their present processes. Columns are tensors, in the order of `names`."""

    choice: Choice
    plan: Plan
    engines: tuple[int, ...]
    """Index of the engine, by destination rank."""
    sources: list[MemoryLayout]
    destinations: list[MemoryLayout]
    """Layouts of the memory that the copies write to: the engines' parameters, or staging memory."""
    buckets: tuple[tuple[str, ...], ...]
    hosts: frozenset[str]
    """Hosts of the ranks of both sides."""
    names: tuple[str, ...]
    """Names of all tensors of the checkpoint, in the trainer's order."""
    dtypes: dict[str, torch.dtype]
    """Number format of each tensor in the engines. A tensor that no engine holds is absent."""
    source_shares: Shares
    engine_shares: dict[int, Shares]
    """Digest shares by engine."""
    units: dict[str, int] = field(default_factory=dict)
    """Units of the digests: elements of which the columns of every rank's boxes are multiples."""
    seed: int = 0
    """Seed of the digests' keys."""
    orders: list[NDArray[np.int64] | None] = field(default_factory=list)
    """By destination rank: its column for each of `names` (-1 for none), or None if the order is the same."""

    def ranks_of(self, engines: Sequence[int] | None) -> list[int]:
        """Returns the destination ranks of these engines, or of all if that is None."""
        return [rank for rank, engine in enumerate(self.engines) if engines is None or engine in engines]

    def stack(self, ranks: Sequence[int], digests: Sequence[Digests]) -> dict[int, Digests]:
        """Returns by destination rank [names] the digests of a rank that are in the rank's own order of tensors."""
        rows = {}
        for rank, mine in zip(ranks, digests, strict=True):
            order = self.orders[rank]
            rows[rank] = mine if order is None else np.where(order >= 0, mine[order], np.uint64(0))
        return rows

    def source_totals(self, sent: Sequence[Sent]) -> Digests:
        """Returns [names] digest of each whole tensor of the trainer, in the engines' number format, from its ranks'
        shares."""
        return self.source_shares.totals(np.stack([each.digests for each in sent]))

    def differing(self, engine: int, rows: Mapping[int, Digests], totals: Digests) -> list[str]:
        """Returns the tensors whose digest over the engine's ranks differs from `totals`, or whose replicas differ."""
        shares = self.engine_shares[engine]
        mine = np.stack([rows[rank] for rank in shares.ranks])
        wrong = (shares.totals(mine) != totals) & shares.held | shares.drifted(mine).any(axis=0)
        return [self.names[column] for column in np.flatnonzero(wrong)]


def make_connection(
    sources: list[SourceInfo],
    destinations: list[DestinationInfo],
    engines: Sequence[int],
    config: WeightSyncConfig,
    choice: Choice | None = None,
    *,
    seed: int = 0,
) -> Connection:
    """Chooses the transport and computes the plan.

    Args:
        choice: transport chosen before; None chooses by `config.transport`.
        seed: seed of the digests' keys.

    Raises:
        WeightSyncFailed: no transport reaches, shapes disagree, or some element of an engine has no source.
    """
    with no_collection():
        choice = choice or choose(sources, destinations, engines, config.transport)
        return _make_connection(sources, destinations, engines, config, choice, seed)


def _make_connection(
    sources: list[SourceInfo],
    destinations: list[DestinationInfo],
    engines: Sequence[int],
    config: WeightSyncConfig,
    choice: Choice,
    seed: int,
) -> Connection:
    trainers = [info.layout for info in sources]
    layouts, buckets = _targets(destinations, choice, config)
    plan = make_plan(
        trainers,
        layouts,
        source_hosts=[info.host for info in sources],
        destination_hosts=[info.host for info in destinations],
        source_devices=[info.device for info in sources],
        destination_devices=[info.device for info in destinations],
    )
    names, dtypes = tuple(trainers[0].tensors), _dtypes(layouts)
    _require_castable(trainers, dtypes)
    of_engine: dict[int, list[int]] = {}
    for rank, engine in enumerate(engines):
        of_engine.setdefault(engine, []).append(rank)
    return Connection(
        choice=choice,
        plan=plan,
        engines=tuple(engines),
        sources=trainers,
        destinations=layouts,
        buckets=buckets,
        hosts=frozenset(info.host for info in [*sources, *destinations]),
        names=names,
        dtypes=dtypes,
        source_shares=Shares(cover(dict(enumerate(trainers)), side="the trainer"), range(len(trainers)), names),
        engine_shares=_engine_shares(layouts, of_engine, names),
        units=common_units({id(layout): layout for layout in [*trainers, *layouts]}.values()),
        seed=seed,
        orders=_orders(names, layouts),
    )


def open_connection(
    connection: Connection,
    source: SourceGroup,
    destinations: DestinationGroup,
    config: WeightSyncConfig,
    rendezvous: "Rendezvous",
) -> None:
    """Sends every rank its part and connects the ranks, on both sides at the same time."""
    carrier = connection.choice.carrier
    two_sided = find_transport(carrier).two_sided
    memories = () if two_sided else tuple(source.call(SourceRank.memory, carrier))
    address, session = rendezvous.begin(connection.hosts) if two_sided else ("", "")

    def links(side: list[str], parts: list[tuple[Copies, ...]], memories: tuple[Any, ...]) -> list[Link]:
        """Returns the link of each rank of a side."""
        return make_links(connection, config, side, parts, memories=memories, address=address, session=session)

    pushes: list[tuple[Copies, ...]] = [()] * len(connection.sources)
    if two_sided:
        whole = Copies.joined(connection.plan.copies)
        num_parts = max(1, len(connection.buckets))
        pushes = [_parts(whole.select(whole.column("source") == rank), num_parts) for rank in range(len(pushes))]
    trainer = [f"source rank {rank}" for rank in range(len(connection.sources))]
    engines = [f"engine {engine}, destination rank {rank}" for rank, engine in enumerate(connection.engines)]
    both(
        lambda: source.on_ranks([RankCall.of(SourceRank.connect, link) for link in links(trainer, pushes, ())]),
        lambda: destinations.on_ranks(
            [RankCall.of(DestinationRank.connect, link) for link in links(engines, pulls(connection), memories)]
        ),
        rendezvous,
    )


def pulls(connection: Connection) -> list[tuple[Copies, ...]]:
    """Returns by destination rank the copies that it pulls, by part."""
    num_parts = max(1, len(connection.buckets))
    return [_parts(mine, num_parts) for mine in connection.plan.copies]


def make_links(
    connection: Connection,
    config: WeightSyncConfig,
    owners: Sequence[str],
    parts: Sequence[tuple[Copies, ...]],
    *,
    memories: tuple[Any, ...] = (),
    address: str = "",
    session: str = "",
) -> list[Link]:
    """Returns the link of each rank of a side.

    Args:
        owners: names of the ranks in messages.
        parts: their copies.
        memories, address, session: see `Link`.
    """
    common = Link(
        transport=connection.choice.carrier,
        rank=0,
        num_sources=len(connection.sources),
        num_destinations=len(connection.destinations),
        parts=(),
        memories=memories,
        dtypes=connection.dtypes,
        buckets=connection.buckets,
        address=address,
        session=session,
        chunk_bytes=config.chunk_bytes,
        timeout_s=config.timeout_s,
        units=connection.units,
        seed=connection.seed,
    )
    return [replace(common, rank=rank, parts=mine, owner=owners[rank]) for rank, mine in enumerate(parts)]


def both(first: Callable[[], T], second: Callable[[], U], rendezvous: "Rendezvous") -> tuple[T, U]:
    """Makes the two calls at the same time and returns their results. If one fails, the ranks that wait for it are
    released, and its error is raised. Of two errors the death of a worker is raised, which is the cause, or else the
    first."""
    calls = rendezvous.threads.submit(first), rendezvous.threads.submit(second)
    try:
        done, later = wait([*calls], return_when=FIRST_EXCEPTION)  # pyright: ignore[reportArgumentType]
        errors = [error for call in done if (error := call.exception())]
        if errors:
            rendezvous.release()
    finally:
        # Neither goes on behind an error of this thread, such as that of a signal.
        wait([*calls])  # pyright: ignore[reportArgumentType]
    errors += [error for call in later if (error := call.exception())]
    if errors:
        raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
    return calls[0].result(), calls[1].result()


class Rendezvous:
    """Rendezvous of the ranks of two-sided transports: a TCPStore in the driver, started on first use."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="weight-sync")
        """The threads of the two sides' calls. They stay, because a sync would wait for new ones."""
        self._store: TCPStore | None = None
        self._host = ""
        self._sessions = 0

    def begin(self, hosts: Set[str]) -> tuple[str, str]:
        """Returns (address, session) of a new group of ranks on `hosts`, at an address that they can reach."""
        host = "127.0.0.1" if hosts == {this_host()} else ray.util.get_node_ip_address()
        if self._store is None or self._host != host:
            self._host, self._store = host, listen(host, timeout=timedelta(seconds=60))
        self._sessions += 1
        return f"{self._host}:{self._store.port}", f"{self._sessions}"

    def release(self) -> None:
        """Makes ranks that wait for a peer in the present session give up."""
        if self._store is not None:
            self._store.set(f"{self._sessions}/{FAILED}", "1")


def _targets(
    destinations: list[DestinationInfo], choice: Choice, config: WeightSyncConfig
) -> tuple[list[MemoryLayout], tuple[tuple[str, ...], ...]]:
    """Returns (the layout that the copies write to, on each destination rank; the buckets of a reload)."""
    if not choice.reloads:
        return [info.layout for info in destinations if info.layout], ()
    first = destinations[0]
    if any((info.tensors, info.dtype) != (first.tensors, first.dtype) for info in destinations):
        raise WeightSyncFailed("the engines' ranks disagree on the checkpoint's tensors or on the number format")
    # A rank knows the formats of the tensors that it holds.
    formats = dict.fromkeys(first.tensors, first.dtype)
    for info in destinations:
        formats |= info.formats
    buckets = make_buckets(first.tensors, formats, config.bucket_bytes)
    layout = staging_layout(buckets, first.tensors, formats)
    return [layout] * len(destinations), buckets


def _parts(copies: Copies, num_parts: int) -> tuple[Copies, ...]:
    """Returns the copies by part, in their order; a reload's by the bucket that they write to."""
    if num_parts == 1:
        return (copies,)
    written = np.array([part_of(name) for name in copies.write_parameters], dtype=np.int64)
    parts = written[copies.column("write_parameter")]
    return tuple(copies.select(parts == part) for part in range(num_parts))


def _engine_shares(
    layouts: Sequence[MemoryLayout], of_engine: Mapping[int, list[int]], names: tuple[str, ...]
) -> dict[int, Shares]:
    """Returns the digest shares of each engine. Engines whose ranks have the same layouts are looked at once."""
    found: dict[tuple[int, ...], Shares] = {}
    shares = {}
    for engine, ranks in of_engine.items():
        key = tuple(id(layouts[rank]) for rank in ranks)
        if key not in found:
            covers = cover({rank: layouts[rank] for rank in ranks}, side=f"engine {engine}")
            found[key] = Shares(covers, ranks, names)
        shares[engine] = found[key].of_ranks(ranks)
    return shares


def _dtypes(destinations: list[MemoryLayout]) -> dict[str, torch.dtype]:
    """Returns the number format of each tensor in the engines, which must be the same in all, because the trainer casts
    once."""
    dtypes: dict[str, torch.dtype] = {}
    seen: set[int] = set()
    for rank, layout in enumerate(destinations):
        if id(layout) in seen:
            continue
        seen.add(id(layout))
        for tensor in layout.boxes:
            dtype = layout.dtype(tensor)
            if dtypes.setdefault(tensor, dtype) != dtype:
                raise WeightSyncFailed(
                    f"destination rank {rank} holds {tensor} as {dtype}, another as {dtypes[tensor]}"
                )
    return dtypes


def _require_castable(trainers: Sequence[MemoryLayout], dtypes: Mapping[str, torch.dtype]) -> None:
    """Refuses a tensor that one side alone holds in 8 bits: without its scales no cast makes the one of the other."""
    for layout in {id(layout): layout for layout in trainers}.values():
        for name in layout.boxes.keys() & dtypes.keys():
            ours, theirs = layout.dtype(name), dtypes[name]
            if ours != theirs and 1 in (ours.itemsize, theirs.itemsize):
                raise WeightSyncFailed(f"the trainer sends {name} as {ours}, but engines hold it as {theirs}")


def _orders(names: tuple[str, ...], layouts: Sequence[MemoryLayout]) -> list[NDArray[np.int64] | None]:
    """Returns for each layout the index of each of `names` in its own order, -1 if it is not there. None if both orders
    are the same."""
    found: dict[int, NDArray[np.int64] | None] = {}
    for layout in {id(layout): layout for layout in layouts}.values():
        mine = tuple(layout.tensors)
        index = {name: column for column, name in enumerate(mine)}
        found[id(layout)] = None if mine == names else np.array([index.get(name, -1) for name in names], dtype=np.int64)
    return [found[id(layout)] for layout in layouts]
