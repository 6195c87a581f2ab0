"""FrozenProof: proves that engines hold the checkpoint that they have loaded, where no trainer holds it."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationGroup, DestinationInfo, DestinationRank, Sent, SourceInfo
from rlframe.weight_sync.choice import Choice
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.connection import Connection, make_connection, make_links
from rlframe.weight_sync.endpoints import this_host
from rlframe.weight_sync.layout.memory import MemoryLayout, identity_layout
from rlframe.weight_sync.proof.digest import DigestPlan

Digests = NDArray[np.uint64]


class FrozenProof:
    """Compares digests of the engines' memory with digests of the checkpoint's tensors, which this process reads one
    at a time. It is the proof of `WeightSync.calibrate` with the files in the place of a trainer; nothing is moved."""

    def __init__(self, tensor: Callable[[str], Tensor], engines: DestinationGroup, *, num_threads: int = 1):
        """
        Args:
            tensor: returns a tensor of the checkpoint by its name, on the CPU.
            engines: started engines.
            num_threads: number of tensors that are read at the same time.
        """
        self._tensor, self._engines, self._num_threads = tensor, engines, num_threads
        self._seed = secrets.randbits(64)
        self._totals: Digests | None = None
        """[names] digest of each tensor of the checkpoint."""

    def prove(self, engines: Sequence[int] | None = None) -> str | None:
        """Proves that `engines`, or all if that is None, hold the checkpoint where their loaders put it. Returns None,
        or why it cannot be proved: a clause whose subject is an engine.

        Raises:
            WeightSyncFailed: an engine holds something else.
        """
        infos = self._engines.call(DestinationRank.describe)
        if refusal := next((info.refusal for info in infos if info.layout is None), None):
            return refusal
        source = SourceInfo(layout=checkpoint_layout(infos), host=this_host(), device="cpu", pid=0)
        connection = self._connected(source, infos, engines)
        ranks = connection.ranks_of(engines)
        rows = connection.stack(ranks, self._engines.call(DestinationRank.digests, engines=engines))
        if self._totals is None:
            digests = self._digests(source.layout, connection)
            self._totals = connection.source_totals([Sent(digests=digests, held=digests)])
        for engine in sorted({connection.engines[rank] for rank in ranks}):
            if names := connection.differing(engine, rows, self._totals):
                raise WeightSyncFailed(
                    f"engine {engine} does not hold the checkpoint where its loader put it: {names[0]} differs, "
                    f"{len(names)} tensors in all. Either the engine moved this tensor after loading it (weights "
                    "repacked?), or the files of the model have changed since"
                )
        return None

    def _connected(self, source: SourceInfo, infos: list[DestinationInfo], engines: Sequence[int] | None) -> Connection:
        """Returns the places of each tensor, after telling the ranks how to digest them."""
        carrier = "shm" if infos[0].on_cpu else "cuda_ipc"
        choice, config = Choice(carrier, False, "nothing is moved"), WeightSyncConfig()
        connection = make_connection([source], infos, self._engines.engines(), config, choice, seed=self._seed)
        owners = [f"engine {engine}, rank {rank}" for rank, engine in enumerate(connection.engines)]
        links = make_links(connection, config, owners, [()] * len(infos))
        chosen = [RankCall.of(DestinationRank.connect, links[rank]) for rank in connection.ranks_of(engines)]
        self._engines.on_ranks(chosen, engines=engines)
        return connection

    def _digests(self, layout: MemoryLayout, connection: Connection) -> Digests:
        """Returns [names] digest of each tensor that engines hold, cast to their number format."""
        names, files = list(connection.dtypes), Files(self._tensor, connection.names)

        def shares(part: list[str]) -> Digests:
            keyed = {"units": connection.units, "seed": connection.seed}
            return DigestPlan(layout, files, connection.dtypes, names=part, **keyed).shares()

        parts = [part for index in range(self._num_threads) if (part := names[index :: self._num_threads])]
        with ThreadPoolExecutor(max_workers=self._num_threads) as pool:
            return np.stack(list(pool.map(shares, parts))).sum(axis=0, dtype=np.uint64)


class Files(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each of them read when it is asked for."""

    def __init__(self, tensor: Callable[[str], Tensor], names: Sequence[str]):
        self._tensor, self._names = tensor, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def checkpoint_layout(infos: Sequence[DestinationInfo]) -> MemoryLayout:
    """Returns the layout of a checkpoint whose tensors are by themselves, from what the ranks of engines, each of which
    may hold other tensors, know of it."""
    layouts = {id(info.layout): info.layout for info in infos if info.layout}.values()
    dtypes = {name: layout.dtype(name) for layout in layouts for name in layout.boxes}
    return identity_layout(
        {
            name: torch.empty(shape, dtype=dtypes.get(name, infos[0].dtype), device="meta")
            for name, shape in infos[0].tensors.items()
        }
    )
