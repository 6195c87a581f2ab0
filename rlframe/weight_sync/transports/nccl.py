"""`nccl`: between processes that cannot see each other's memory. Packed messages go from each source to each
destination.

Trainers and engines form one process group of their own, separate from any default group. The copies of each pair of
ranks are packed into messages of bounded size. Two buffers alternate, so that the next message is packed while one is
being sent. If parameters are in host memory the same code runs over gloo.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.plan.packing import ALIGNMENT, Message, Packing, capacity_of, cut, message_bytes
from rlframe.weight_sync.transports.base import FAILED, Link, RankInfo, Transport

T = TypeVar("T")

POLL_S = 0.25
"""Seconds between two checks whether the driver gave up the sync."""


class Group:
    """All source ranks and then all destination ranks, as one process group over NCCL or gloo."""

    def __init__(self, link: Link, rank: int, device: torch.device):
        """Connects to the other ranks. All ranks must construct at the same time.

        Raises:
            WeightSyncFailed: some rank did not come within the time limit.
        """
        self._timeout, self._device = timedelta(seconds=link.timeout_s), device
        self._backend: Any = None
        host, port = link.address.rsplit(":", 1)
        size = link.num_sources + link.num_destinations
        try:
            store, self._watched = (
                PrefixStore(link.session, TCPStore(host, int(port), is_master=False, timeout=self._timeout))
                for _ in range(2)
            )
        except RuntimeError as error:
            raise WeightSyncFailed(f"the driver's store at {link.address} cannot be reached: {error}") from error
        self._backend = self._guarded(lambda: _backend(store, rank, size, device, self._timeout, host))

    def exchange(self, messages: list[tuple[int, Tensor]], tag: int, *, send: bool) -> list[Any]:
        """Starts sending, or receiving, one message per peer. Returns the works to wait for."""
        backend = self._backend
        if backend is None:
            raise WeightSyncFailed("the group for weights is closed")
        operation = backend.send if send else backend.recv
        try:
            if self._device.type == "cpu":
                return [operation([buffer], peer, tag) for peer, buffer in messages]
            backend._start_coalescing()
            for peer, buffer in messages:
                operation([buffer], peer, tag)
            return [backend._end_coalescing()]
        except RuntimeError as error:
            raise self._broken(error) from error

    def wait(self, works: list[Any]) -> None:
        """Waits for the works. On CUDA the current stream waits, see `finish`.

        Raises:
            WeightSyncFailed: a peer is gone or too slow, or the driver gave up the sync.
        """
        if self._device.type == "cpu" and works:
            self._guarded(lambda: [work.wait(self._timeout) for work in works])
        else:
            for work in works:
                work.wait()

    def finish(self) -> None:
        """Waits for everything on the current stream. Raises as `wait`."""
        if self._device.type == "cpu":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        start = look = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now > start + self._timeout.total_seconds():
                raise self._broken(f"no answer within {self._timeout.total_seconds():.0f} s")
            if now > look + POLL_S:
                look = now
                self._check_driver()
            time.sleep(2e-5)

    def close(self) -> None:
        """Leaves the group. Peers that wait for this rank fail."""
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type != "cpu":
            backend.abort()

    def _guarded(self, call: Callable[[], T]) -> T:
        """Runs `call` in a thread of its own and returns its result. The thread is left behind if the driver gives up
        the sync, because gloo cannot interrupt a wait."""
        done = threading.Event()
        results: list[T] = []
        # The text only: an exception kept here would keep the group alive, and with it the peers that wait for it.
        failures: list[str] = []

        def run() -> None:
            try:
                results.append(call())
            except RuntimeError as error:
                failures.append(str(error))
            done.set()

        threading.Thread(target=run, name="weight sync", daemon=True).start()
        while not done.wait(POLL_S):
            self._check_driver()
        if failures:
            raise self._broken(failures[0])
        return results[0]

    def _check_driver(self) -> None:
        """Raises an error if the driver has given up this sync, or has ended itself."""
        try:
            failed = self._watched.check([FAILED])
        except RuntimeError as error:
            raise self._broken(error) from error
        if failed:
            raise self._broken("another rank of this sync failed")

    @staticmethod
    def _broken(reason: object) -> WeightSyncFailed:
        text = str(reason).strip().splitlines()[0]
        return WeightSyncFailed(f"a peer of the weight transfer is gone or did not answer: {text}")


def _backend(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta, host: str) -> Any:
    """Returns a process group that is not in torch.distributed's own registry."""
    if device.type == "cpu":
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        # The interface that reaches the driver. The host's own name may resolve to none, or only after seconds.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            options._devices = [gloo.create_device(hostname=probe.getsockname()[0])]
        options._timeout = timeout
        return gloo(store, rank, size, options)
    options = distributed.ProcessGroupNCCL.Options()
    # This limit ends first, with a message; NCCL's own watchdog ends the process.
    options._timeout = timeout + timedelta(seconds=300)
    torch.cuda.set_device(device)
    backend = distributed.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


class _Part:
    """The messages of one part of this rank, in rounds: one message per peer at a time."""

    def __init__(self, messages: dict[int, list[Message]], parameters: Mapping[str, Tensor], buffers: "_Buffers"):
        self.rounds: list[tuple[list[tuple[int, Tensor]], Packing]] = []
        for turn in range(max(map(len, messages.values()), default=0)):
            mine = [
                (peer, of_peer[turn], buffers.of(peer, turn)[: message_bytes(of_peer[turn])])
                for peer, of_peer in messages.items()
                if turn < len(of_peer)
            ]
            packing = Packing(
                parameters, [(message, buffer) for _, message, buffer in mine], into_buffers=buffers.sends
            )
            self.rounds.append(([(peer, buffer) for peer, _, buffer in mine], packing))


class _Buffers:
    """Two buffers per peer, as large as its longest message."""

    def __init__(self, parts: list[dict[int, list[Message]]], device: torch.device, *, sends: bool):
        self.sends = sends
        sizes: dict[int, int] = {}
        for part in parts:
            for peer, messages in part.items():
                sizes[peer] = max([sizes.get(peer, 0), *map(message_bytes, messages)])
        self._memory = {
            peer: torch.empty(2, -(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=device)
            for peer, size in sizes.items()
        }

    def of(self, peer: int, turn: int) -> Tensor:
        """Returns the [bytes] buffer of a peer."""
        return self._memory[peer][turn % 2]


class PackedMessages(Transport):
    """Two-sided transport: sources push while destinations pull."""

    two_sided: ClassVar[bool] = True

    def __init__(self) -> None:
        self._group: Group | None = None
        self._parts: list[_Part] = []

    @staticmethod
    def share(parameters: Mapping[str, Tensor]) -> None:
        """Shares nothing, because the sources send."""

    @staticmethod
    def refusal(source: RankInfo, destination: RankInfo) -> str | None:
        if source.on_cpu != destination.on_cpu:
            return "nccl works between GPUs, or with gloo between CPUs, not from one to the other"
        if not source.on_cpu and source.device == destination.device:
            return f"nccl cannot send from GPU {source.device} to itself"
        return None

    def open_source(self, parameters: Mapping[str, Tensor], link: Link) -> None:
        self._open(parameters, link, "read")

    def open_destination(self, parameters: Mapping[str, Tensor], link: Link) -> None:
        self._open(parameters, link, "write")

    def _open(self, parameters: Mapping[str, Tensor], link: Link, side: Literal["read", "write"]) -> None:
        device = next((value.device for value in parameters.values()), torch.device("cpu"))
        first = link.num_sources if side == "read" else 0
        # Both ends of a pair must split alike, so the larger side determines each pair's share of the bound.
        capacity = capacity_of(link.chunk_bytes, max(link.num_sources, link.num_destinations))
        parts = []
        for copies in link.parts:
            peers = copies.destinations if side == "read" else copies.sources
            column = copies.column("destination" if side == "read" else "source")
            parts.append(
                {first + peer: cut(copies.select(column == peer), side, link.dtypes, capacity) for peer in peers}
            )
        buffers = _Buffers(parts, device, sends=side == "read")
        self._parts = [_Part(part, parameters, buffers) for part in parts]
        self._group = Group(link, link.rank if side == "read" else link.num_sources + link.rank, device)

    def push(self, part: int = 0) -> None:
        group = self._joined
        under_way: list[list[Any]] = [[], []]
        for turn, (messages, packing) in enumerate(self._parts[part].rounds):
            group.wait(under_way[turn % 2])
            packing.run()
            under_way[turn % 2] = group.exchange(messages, turn, send=True)
        for works in under_way:
            group.wait(works)
        group.finish()

    def pull(self, part: int = 0) -> None:
        group, rounds = self._joined, self._parts[part].rounds
        under_way: list[list[Any]] = [[], []]
        for turn in range(len(rounds) + 1):
            if turn < len(rounds):
                # The buffer is free: its content of two turns ago was unpacked in the previous turn.
                under_way[turn % 2] = group.exchange(rounds[turn][0], turn, send=False)
            if turn:
                group.wait(under_way[(turn - 1) % 2])
                rounds[turn - 1][1].run()
        group.finish()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._parts = None, []

    @property
    def _joined(self) -> Group:
        assert self._group is not None, "open before push and pull"
        return self._group


TRANSPORT = PackedMessages
