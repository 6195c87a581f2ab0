"""Every transport between real processes with real layouts, and what is left when one of them dies in the middle."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.models.families.base import Shard
from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import RlframeError, WeightSyncFailed, WorkerDied
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import (
    DestinationGroup,
    Received,
    SourceGroup,
    WeightDestination,
    WeightSource,
    WeightSync,
    WeightSyncConfig,
)
from rlframe.weight_sync.layout.memory import MemoryLayout, clear_padding, load_tensor, record
from tests.multiprocess.distributed import template
from tests.unit.models.parameters import SMALL_MOE, empty, shards

MODEL = FAMILY.architecture(SMALL_MOE)
TENSORS = FAMILY.tensors(MODEL)
TRAINER = [shard for shard in shards(MODEL, tp=2, ep=2, vocab_multiple=8) if shard.tp_rank == shard.ep_rank]
WHOLE = shards(MODEL)
CUT = [shard for shard in shards(MODEL, tp=2, etp=2) if shard.tp_rank == shard.etp_rank]
LIMIT_S = 120.0
"""Within which a death must have been noticed; the transports' own limit is much longer."""


class Memory:
    """The parameters of one rank, and their layout."""

    def __init__(self, shard: Shard, dtype: torch.dtype):
        self.parameters = empty(MODEL, shard, dtype)
        self.layout: MemoryLayout = record(lambda p, c: FAMILY.load(p, c, MODEL, shard), self.parameters, TENSORS)
        clear_padding(self.layout, self.parameters)
        self.fill(0)

    def fill(self, version: int) -> None:
        """The weights of that version, by the loader's own recording."""
        generator = torch.Generator().manual_seed(version)
        for name, shape in TENSORS.items():
            load_tensor(self.layout, self.parameters, name, torch.randn(shape, generator=generator))

    def holds(self, version: int) -> bool:
        """Whether every bit is that version's, padding included."""
        before = {name: value.clone() for name, value in self.parameters.items()}
        self.fill(version)
        same = all(torch.equal(value, before[name]) for name, value in self.parameters.items())
        for name, value in before.items():
            self.parameters[name].copy_(value)
        return same

    # The loader of an engine that takes streams.
    def begin(self) -> None:
        """Nothing to prepare."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Into place at once."""
        for name, value in tensors:
            load_tensor(self.layout, self.parameters, name, value)

    def finish(self) -> None:
        """Nothing is pending."""


class Rank:
    """What a process serves: one end of weight sync, and handles for the test."""

    def __init__(self, shard: Shard, *, trainer: bool):
        torch.set_num_threads(1)
        self._memory = Memory(shard, torch.float32 if trainer else torch.bfloat16)
        layout, parameters = self._memory.layout, self._memory.parameters
        if trainer:
            self.end: Any = WeightSource(layout, parameters)
        else:
            kind = {"tensors": TENSORS, "dtype": torch.bfloat16, "device": torch.device("cpu"), "reload": self._memory}
            self.end = WeightDestination(layout, parameters, **kind)

    def fill(self, version: int) -> None:
        """What the optimizer would do."""
        self._memory.fill(version)

    def holds(self, version: int) -> bool:
        """See Memory.holds."""
        return self._memory.holds(version)

    def die_within(self, method: str) -> None:
        """In the next push or pull this process kills itself, with about half of it done."""
        transport = self.end._transport
        if transport.two_sided:
            rounds = transport._parts[0].rounds
            half, exchange = len(rounds) // 2, transport._group.exchange

            def broken(messages: Any, tag: int, *, send: bool) -> Any:
                if tag >= half:
                    os.kill(os.getpid(), signal.SIGKILL)
                return exchange(messages, tag, send=send)

            transport._group.exchange = broken
            return
        whole = transport._parts[0]

        def torn(part: int = 0) -> None:
            for target, source in whole[: len(whole) // 2]:
                target.copy_(source)
            os.kill(os.getpid(), signal.SIGKILL)

        transport.pull = torn


def serve(pipe: Connection, shard: Shard, trainer: bool) -> None:
    """Answers calls until the pipe closes."""
    rank = Rank(shard, trainer=trainer)
    while True:
        try:
            call: RankCall = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, call.on(rank if hasattr(rank, call.name) else rank.end)))
        except RlframeError as error:
            pipe.send((False, error))


class Process:
    """A rank in a process of its own, as the driver sees it."""

    def __init__(self, name: str, shard: Shard, *, trainer: bool):
        context = template()
        self.name, self._busy = name, threading.Lock()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, shard, trainer), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, call: RankCall) -> Any:
        """What the method returns over there."""
        with self._busy:
            try:
                self._pipe.send(call)
                fine, value = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise WorkerDied(f"{self.name} is gone") from error
        if not fine:
            raise value
        return value

    def stop(self) -> None:
        """At once."""
        self.process.kill()
        self.process.join()


def at_once(ranks: Sequence[Process], asked: Sequence[RankCall]) -> list[Any]:
    """The call of every rank, by rank; of several errors the one of a process that is gone."""
    pool = ThreadPoolExecutor(max_workers=len(ranks))
    calls = [pool.submit(rank.call, mine) for rank, mine in zip(ranks, asked, strict=True)]
    wait(calls, return_when=FIRST_EXCEPTION)
    pool.shutdown(wait=False)
    # As with actors, the others go on with what they were told; what comes next waits behind it. A death brings errors
    # of those who talked to the dead one, and they may be quicker.
    errors = [error for call in calls if call.done() and (error := call.exception())]
    if errors and not any(isinstance(error, WorkerDied) for error in errors):
        errors += [WorkerDied(f"{rank.name} is gone") for rank in ranks if not rank.process.is_alive()]
    if errors:
        raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
    return [call.result() for call in calls]


class Sources(SourceGroup):
    """Trainer processes."""

    def __init__(self) -> None:
        self.ranks = [Process(f"trainer rank {rank}", shard, trainer=True) for rank, shard in enumerate(TRAINER)]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def on_ranks(self, calls: Sequence[RankCall]) -> list[Any]:
        return at_once(self.ranks, calls)


class Engines(DestinationGroup):
    """Engine 0 on one process, engine 1 on two."""

    def __init__(self) -> None:
        self._shards = [(0, WHOLE[0]), (1, CUT[0]), (1, CUT[1])]
        self.ranks = [self._start(rank) for rank in range(3)]
        self.gates: dict[int, int | str | None] = {0: None, 1: None}
        """By engine: the version it may sample, or why it may not."""

    def _start(self, rank: int) -> Process:
        engine, shard = self._shards[rank]
        return Process(f"engine {engine} (rank {rank})", shard, trainer=False)

    def restart(self, rank: int) -> None:
        """A new process in the place of a dead one."""
        self.ranks[rank].stop()
        self.ranks[rank] = self._start(rank)

    def engines(self) -> list[int]:
        return [engine for engine, _ in self._shards]

    def on_ranks(self, calls: Sequence[RankCall], *, engines: Sequence[int] | None = None) -> list[Any]:
        chosen = [rank for rank, engine in enumerate(self.engines()) if engines is None or engine in engines]
        return at_once([self.ranks[rank] for rank in chosen], calls)

    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:
        self.gates.update(
            {engine: "a sync is under way" for engine in self.gates if engines is None or engine in engines}
        )
        return self.call(DestinationRank.receive, engines=engines)

    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        self.gates.update({engine: version for engine in self.gates if engines is None or engine in engines})

    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        self.gates.update({engine: reason for engine in self.gates if engines is None or engine in engines})


class World:
    """Two trainer processes, three engine processes."""

    def __init__(self) -> None:
        self.sources, self.engines = Sources(), Engines()

    def connect(self, **settings: Any) -> WeightSync:
        """All at version 0, calibrated."""
        self.sources.call(Rank.fill, 0)
        self.engines.call(Rank.fill, 0)
        sync = WeightSync(self.sources, self.engines, WeightSyncConfig(timeout_s=300, **settings))
        sync.connect()
        sync.calibrate(version=0)
        return sync

    def stop(self) -> None:
        """Every process."""
        for rank in [*self.sources.ranks, *self.engines.ranks]:
            rank.stop()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Shared by the tests that kill nobody."""
    world = World()
    yield world
    world.stop()


@pytest.fixture
def mortals() -> Iterator[World]:
    """For one test that kills."""
    world = World()
    yield world
    world.stop()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "shm"),
        ({"transport": "nccl"}, "nccl"),
        # 341 bytes a pair of ranks, so that most tensors are cut and many messages follow each other.
        ({"transport": "nccl", "chunk_bytes": 1024}, "nccl"),
        ({"transport": "reload", "bucket_bytes": 1024}, "reload over shm"),
    ],
)
def test_every_transport_delivers_every_bit(world: World, settings: dict[str, Any], name: str) -> None:
    sync = world.connect(**settings)
    for version in (1, 2):
        world.sources.call(Rank.fill, version)
        assert sync.publish(version=version).transport == name
        assert world.engines.call(Rank.holds, version) == [True] * 3
    assert world.engines.gates == {0: 2, 1: 2}
    sync.close()


def test_a_reload_between_hosts_delivers_every_bit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.weight_sync.choice.ORDER", ("nccl",))
    sync = world.connect(transport="reload", bucket_bytes=2048, chunk_bytes=1024)
    world.sources.call(Rank.fill, 1)
    assert sync.publish(version=1).transport == "reload over nccl"
    assert world.engines.call(Rank.holds, 1) == [True] * 3
    sync.close()


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_an_engine_that_dies_in_mid_pull_leaves_no_mixture_and_comes_back(mortals: World, transport: str) -> None:
    sync = mortals.connect(transport=transport, chunk_bytes=1024)
    mortals.sources.call(Rank.fill, 1)
    mortals.engines.ranks[2].call(RankCall.of(Rank.die_within, "pull"))
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"engine 1 \(rank 2\) is gone") as caught:
        sync.publish(version=1)
    assert time.monotonic() - start < LIMIT_S
    assert "engine 1 does not answer" in str(caught.value) and "none of them samples" in str(caught.value)
    if transport == "shm":
        assert "engine 0 holds version 1" in str(caught.value)
    assert all(isinstance(gate, str) for gate in mortals.engines.gates.values())
    assert sync.policy_version == 0
    # Its other rank starts anew too: an engine restarts as a whole. The trainer holds version 1 already, so that
    # nobody can be given version 0 again; the engine is proved and waits.
    mortals.engines.restart(1)
    mortals.engines.restart(2)
    sync.rejoin([1])
    assert mortals.engines.gates[1] == "restarted and waiting for the next version"
    mortals.sources.call(Rank.fill, 2)
    sync.publish(version=2)
    assert mortals.engines.call(Rank.holds, 2) == [True] * 3
    assert mortals.engines.gates == {0: 2, 1: 2}
    # And one that dies between two syncs gets the present version back.
    mortals.engines.restart(0)
    sync.rejoin([0])
    assert mortals.engines.call(Rank.holds, 2) == [True] * 3
    assert mortals.engines.gates == {0: 2, 1: 2}


def test_a_trainer_that_dies_in_mid_push_leaves_no_engine_waiting_and_none_sampling_a_mixture(mortals: World) -> None:
    sync = mortals.connect(transport="nccl", chunk_bytes=1024)
    mortals.sources.call(Rank.fill, 1)
    mortals.sources.ranks[1].call(RankCall.of(Rank.die_within, "push"))
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="trainer rank 1 is gone.*engine 0 holds .*engine 1 holds "):
        sync.publish(version=1)
    assert time.monotonic() - start < LIMIT_S
    for engine, gate in mortals.engines.gates.items():
        ranks = [rank for rank, number in enumerate(mortals.engines.engines()) if number == engine]
        whole = all(mortals.engines.ranks[rank].call(RankCall.of(Rank.holds, 0)) for rank in ranks)
        assert gate == 0 if whole else isinstance(gate, str)


def test_a_trainer_that_dies_before_a_byte_moved_leaves_the_engines_at_the_old_version(mortals: World) -> None:
    sync = mortals.connect(transport="nccl")
    mortals.sources.ranks[0].stop()
    mortals.sources.ranks[1].stop()
    with pytest.raises(WorkerDied, match="engine 0 holds version 0, engine 1 holds version 0; the trainer does not"):
        sync.publish(version=1)
    assert mortals.engines.gates == {0: 0, 1: 0}
    assert mortals.engines.call(Rank.holds, 0) == [True] * 3


def test_a_transport_that_cannot_work_is_refused_with_the_reason(world: World) -> None:
    with pytest.raises(WeightSyncFailed, match="weight_sync.transport=cuda_ipc is not possible: cuda_ipc"):
        world.connect(transport="cuda_ipc")
