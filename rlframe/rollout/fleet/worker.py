"""RolloutWorker: the Ray actor of one engine. Sampling and what steers it run side by side in its threads."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import psutil
import ray
import torch

from rlframe.cluster.config import Device
from rlframe.cluster.worker import Worker
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.rollout.base.config import EngineDtype, RolloutConfig
from rlframe.rollout.base.engine import RolloutEngine
from rlframe.types.batch import TopLogprobs
from rlframe.types.rollout import Completion, GenerationRequest
from rlframe.utils.calls import RankCall
from rlframe.utils.registry import find
from rlframe.weight_sync.border import DestinationRank, Received

T = TypeVar("T")
GENERATE, SIGNALS = "generate", "signals"
"""Ray's names for the threads that sample, and for the one that answers when all others are busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSetup:
    """What the engines need to start, besides their devices."""

    rollout: RolloutConfig
    model: ModelConfig
    dtype: EngineDtype
    """What `rollout.dtype` comes to: float32 or bfloat16, not auto."""
    device: Device
    seed: int
    """The run's: decides every sampled token, and the weights of a model with random_init."""
    with_routes: bool = False
    """Completions come with their routed experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slept:
    """What a sleep of an engine came to."""

    weights_lost: bool
    """True when the weights must be synced before the engine samples again."""
    freed_bytes: int | None
    """Device memory given back; None where it is not measured."""


class ScoringWorker(Protocol):
    """What whoever has given tokens judged asks of the actor of an engine."""

    def score(self, sequences: list[tuple[int, ...]]) -> list[list[float]]:
        """See RolloutEngine.score."""
        ...

    def top(self, sequences: list[tuple[int, ...]], k: int) -> list[TopLogprobs]:
        """See RolloutEngine.top."""
        ...


class EngineWorker(ScoringWorker, Protocol):
    """What the fleet asks of the actor of an engine."""

    def start(self, setup: RolloutSetup) -> list[tuple[int, float]]:
        """Builds the engine and loads its weights. Returns the processes it started: pid and time of creation, each."""
        ...

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """See RolloutEngine.generate."""
        ...

    def receive(self, version: int) -> list[Received]:
        """Lets the weights of `version` in, while running requests pause. They are unverified until `commit`."""
        ...

    def commit(self, version: int) -> None:
        """The driver has proved that the engine holds `version`: it may sample."""
        ...

    def fail(self, reason: str) -> None:
        """The weights are not known to be those of any version: requests are refused with `reason`, and those that run
        return what earlier weights made of them."""
        ...

    def on_ranks(self, calls: Sequence[RankCall[DestinationRank, T]]) -> list[T]:
        """See RolloutEngine.on_ranks."""
        ...

    def abort(self) -> None:
        """See RolloutEngine.abort."""
        ...

    def is_alive(self) -> bool:
        """See RolloutEngine.is_alive."""
        ...

    def sleep(self) -> Slept:
        """See RolloutEngine.sleep. Nothing more happens to an engine that sleeps already."""
        ...

    def wake(self) -> None:
        """See RolloutEngine.wake."""
        ...

    def close(self) -> None:
        """See RolloutEngine.close."""
        ...


class RolloutWorker(Worker, EngineWorker):
    """Forwards typed calls to its engine, and keeps the order of pause, sync and proof."""

    engine: RolloutEngine

    def start(self, setup: RolloutSetup) -> list[tuple[int, float]]:
        """Builds the engine and load its weights. Returns the processes it started: pid and time of creation, each."""
        engine_class, _ = find("rlframe.rollout", setup.rollout.name, key="rollout.name")
        cuda = setup.device is Device.CUDA or (setup.device is Device.AUTO and torch.cuda.is_available())
        self._lock = threading.Lock()
        self._num_running = 0
        self._num_ranks = setup.rollout.devices_per_engine
        self._asleep = False
        self.engine = engine_class(
            setup.rollout,
            folder=resolve(setup.model),
            dtype=getattr(torch, setup.dtype.value),
            device="cuda" if cuda else "cpu",
            random_seed=setup.seed if setup.model.random_init else None,
            with_routes=setup.with_routes,
        )
        return [(child.pid, child.create_time()) for child in psutil.Process().children(recursive=True)]

    @ray.method(concurrency_group=GENERATE)
    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """See RolloutEngine.generate."""
        with self._lock:
            self._num_running += 1
        try:
            return self.engine.generate(requests)
        finally:
            with self._lock:
                self._num_running -= 1

    def score(self, sequences: list[tuple[int, ...]]) -> list[list[float]]:
        """See RolloutEngine.score."""
        return self.engine.score(sequences)

    def top(self, sequences: list[tuple[int, ...]], k: int) -> list[TopLogprobs]:
        """See RolloutEngine.top."""
        return self.engine.top(sequences, k)

    def receive(self, version: int) -> list[Received]:
        """Lets the weights of `version` in, while running requests pause. They are unverified until `commit`."""
        self.engine.gate.begin(version)
        # Requests that come from here on wait at the gate; what has passed it is counted.
        if self._num_running:
            self.engine.pause()
        if self._asleep:
            self.engine.wake_weights()
        received = self.engine.on_ranks([RankCall.of(DestinationRank.receive)] * self._num_ranks)
        self.engine.weights_lost = False
        return received

    def commit(self, version: int) -> None:
        """The driver has proved that the engine holds `version`: it may sample."""
        # Before the gate opens: a new request must not find a prefix in the cache that older weights computed.
        if not self._asleep:
            self.engine.resume()
        self.engine.gate.commit(version)

    @ray.method(concurrency_group=SIGNALS)
    def fail(self, reason: str) -> None:
        """The weights are not known to be those of any version: requests are refused with `reason`, and those that run
        return what earlier weights made of them."""
        self.engine.gate.fail(reason)
        if self._num_running:
            self.engine.abort()

    def on_ranks(self, calls: Sequence[RankCall[DestinationRank, T]]) -> list[T]:
        """See RolloutEngine.on_ranks."""
        return self.engine.on_ranks(calls)

    def pause(self) -> None:
        """See RolloutEngine.pause."""
        self.engine.pause()

    def resume(self) -> None:
        """See RolloutEngine.resume."""
        self.engine.resume()

    @ray.method(concurrency_group=SIGNALS)
    def abort(self) -> None:
        """See RolloutEngine.abort."""
        self.engine.abort()

    @ray.method(concurrency_group=SIGNALS)
    def is_alive(self) -> bool:
        """See RolloutEngine.is_alive."""
        return self.engine.is_alive()

    def sleep(self) -> Slept:
        """See RolloutEngine.sleep. Nothing more happens to an engine that sleeps already."""
        if not self._asleep:
            self.engine.sleep()
        self._asleep = True
        if self.engine.weights_lost:
            self.engine.gate.fail("a sleep dropped them, and no sync has put them back")
        return Slept(weights_lost=self.engine.weights_lost, freed_bytes=self.engine.freed_bytes)

    def wake_weights(self) -> None:
        """See RolloutEngine.wake_weights."""
        self.engine.wake_weights()

    def wake(self) -> None:
        """See RolloutEngine.wake. What was synced during the sleep is read by nothing computed before."""
        self.engine.wake()
        self._asleep = False
        self.engine.resume()

    @ray.method(concurrency_group=SIGNALS)
    def close(self) -> None:
        """See RolloutEngine.close."""
        self.engine.close()


def end_processes(processes: Sequence[tuple[int, float]], patience_s: float = 10.0) -> None:
    """Kills what is left of a dead engine's processes on this machine, and wait until their memory is free. A Ray task.

    Args:
        processes: as `RolloutWorker.start` returned them.
    """
    left = []
    for pid, created in processes:
        try:
            process = psutil.Process(pid)
            # The number may have gone to another process since.
            if process.create_time() == created:
                process.kill()
                left.append(process)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=patience_s)
