"""RolloutWorker: the Ray actor of one engine. Sampling and control calls run side by side in its threads.

Imports no torch: a process that has a handle of the actor, such as the runner's, imports this file.
"""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil
import ray

from rlframe.cluster.config import Device
from rlframe.cluster.cuda import check_cuda
from rlframe.cluster.profiling.config import ProfileConfig
from rlframe.cluster.worker import Worker
from rlframe.models.config import ModelConfig
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.base.config import EngineDtype, RolloutConfig
from rlframe.rollout.base.speculative import Drafts
from rlframe.types.input import ModelInput
from rlframe.types.packed import Packed
from rlframe.types.rollout import Completion, GenerationRequest, Scored
from rlframe.utils.calls import RankCall
from rlframe.utils.process import garbage
from rlframe.utils.process.early import EarlyProgram
from rlframe.utils.registry import find

if TYPE_CHECKING:
    from rlframe.cluster.profiling.request import Recorder, Request
    from rlframe.rollout.base.engine import RolloutEngine
    from rlframe.types.batch import TopLogprobs
    from rlframe.weight_sync.border import DestinationRank, Received

T = TypeVar("T")
GENERATE, SIGNALS = "generate", "signals"
"""Ray's concurrency groups: the threads that sample, and the one that stays free for control calls."""
END_S = 10.0
"""Seconds that requests for whose answers nobody waits may take to end, when the engine is to sleep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSetup:
    """The settings with which engines start, apart from their devices."""

    rollout: RolloutConfig
    model: ModelConfig
    dtype: EngineDtype
    """Resolved value of `rollout.dtype`: float32 or bfloat16, not auto."""
    device: Device
    seed: int
    """The run's seed. It decides every sampled token, and the weights of a model with random_init."""
    with_routes: bool = False
    """Whether completions carry their routed experts."""
    adapter: EngineAdapter | None = None
    """Adapters that the engines compute with. None: their weights are the whole policy."""
    with_mtp: bool = False
    """Whether the policy has the head for multi-token prediction with which the engines draft."""
    profile: "EngineProfile | None" = None
    """The profiles of the engines. None profiles none."""

    @property
    def stop_fault(self) -> str:
        """Returns the reason for which requests must have no stop strings. Empty if they may."""
        if not (self.with_routes and self.rollout.stop_loses_routes):
            return ""
        return (
            f"train.moe.router_replay=true needs the routed experts of each response, which rollout.name="
            f"{self.rollout.name} does not return with stop strings"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProfile:
    """The settings of profiles with which engines start, because theirs must know them from the start."""

    config: ProfileConfig
    folder: str
    """Folder of the run's profiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slept:
    """The result of putting an engine to sleep."""

    weights_lost: bool
    """Whether the weights must be synced before the engine samples again."""
    freed_bytes: int | None
    """Bytes of device memory given back. None if not measured."""


class ScoringWorker(Protocol):
    """The calls of an engine's actor that score given tokens."""

    def score(self, sequences: list[ModelInput]) -> list[list[float]]:
        """See RolloutEngine.score."""
        ...

    def score_with_routes(self, sequences: list[ModelInput]) -> list[Scored]:
        """See RolloutEngine.score_with_routes."""
        ...

    def top(self, sequences: list[ModelInput], k: int) -> "list[TopLogprobs]":
        """See RolloutEngine.top."""
        ...


class EngineWorker(ScoringWorker, Protocol):
    """The calls of an engine's actor that the fleet uses."""

    def prepare(self, setup: RolloutSetup) -> None:
        """See RolloutEngine.prepare. `start` does without it."""
        ...

    def start(self, setup: RolloutSetup) -> list[tuple[int, float]]:
        """Builds the engine and loads its weights. Returns pid and creation time of each process it started."""
        ...

    def generate(self, requests: Packed[GenerationRequest]) -> Packed[Completion]:
        """See RolloutEngine.generate."""
        ...

    def generate_each(self, requests: Packed[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        """See RolloutEngine.generate_each. Ray streams what it yields."""
        ...

    def receive(self, version: int) -> "list[Received]":
        """Receives the weights of `version` while running requests pause. They are unverified until `commit`."""
        ...

    def commit(self, version: int) -> None:
        """Records that the driver has proved the engine to hold `version`, so that it may sample."""
        ...

    def fail(self, reason: str) -> None:
        """Records that the weights are of no known version. New requests are refused with `reason`; running ones return
        the tokens that earlier weights sampled."""
        ...

    def on_ranks(self, calls: "Sequence[RankCall[DestinationRank, T]]") -> list[T]:
        """See RolloutEngine.on_ranks."""
        ...

    def abort(self, names: Collection[str] | None = None) -> None:
        """See RolloutEngine.abort."""
        ...

    def is_alive(self) -> bool:
        """See RolloutEngine.is_alive."""
        ...

    def drafts(self) -> Drafts:
        """Returns what became of drafts since the last call."""
        ...

    def sleep(self) -> Slept:
        """See RolloutEngine.sleep. Does nothing if the engine sleeps already."""
        ...

    def wake(self) -> None:
        """See RolloutEngine.wake."""
        ...

    def close(self) -> None:
        """See RolloutEngine.close."""
        ...


class RolloutWorker(Worker, EngineWorker):
    """Forwards typed calls to its engine, and keeps the order of pause, sync and proof."""

    engine: "RolloutEngine"

    def __init__(self, *, ahead: EarlyProgram | None = None, **worker: Any):
        """Accepts the arguments of Worker and the following.

        Args:
            ahead: see RolloutEngine.ahead.
        """
        self._ahead = ahead
        super().__init__(**worker)

    def _begin(self) -> None:
        """See Worker."""
        self._early = self._ahead.start() if self._ahead else None

    def prepare(self, setup: RolloutSetup) -> None:
        """See RolloutEngine.prepare. `start` does without it."""
        from rlframe.models.hub import resolve

        engine_class, _ = find("rlframe.rollout", setup.rollout.name, key="rollout.name")
        early, self._early = {"early": self._early} if self._early else {}, None
        engine_class.prepare(setup.rollout, folder=resolve(setup.model), device=setup.device.value, **early)

    def start(self, setup: RolloutSetup) -> list[tuple[int, float]]:
        """Builds the engine and loads its weights. Returns pid and creation time of each process it started."""
        import torch  # not at the head: see there

        from rlframe.models.hub import resolve

        if self._early:
            # The actor of an engine that is restarted is not asked to prepare.
            self.prepare(setup)
        engine_class, _ = find("rlframe.rollout", setup.rollout.name, key="rollout.name")
        cuda = setup.device is Device.CUDA
        if cuda:
            check_cuda()
        self._lock = threading.Lock()
        self._num_running = 0
        self._num_ranks = setup.rollout.devices_per_engine
        self._asleep = False
        self._drafts = Drafts()
        config, profile = setup.rollout, setup.profile
        if profile and self.rank in profile.config.engines:
            config = config.profiled(profile.config, f"{profile.folder}/engines_{self.rank}")
        self.engine = engine_class(
            config,
            folder=resolve(setup.model),
            dtype=getattr(torch, setup.dtype.value),
            device="cuda" if cuda else "cpu",
            random_seed=setup.seed if setup.model.random_init else None,
            with_routes=setup.with_routes,
            adapter=setup.adapter,
            float32_logits=setup.model.float32_logits,
            with_mtp=setup.with_mtp,
        )
        garbage.release()
        return [(child.pid, child.create_time()) for child in psutil.Process().children(recursive=True)]

    def _recorder(self, request: "Request") -> "Recorder":
        """Returns the engine's own profiler, or one of this process if that is all there is of the engine."""
        from rlframe.rollout.base.engine import ProfilesItself  # not at the head: see there
        from rlframe.rollout.fleet.profiling import EngineRecorder

        if isinstance(self.engine, ProfilesItself):
            return EngineRecorder(self.engine, request)
        return super()._recorder(request)

    @ray.method(concurrency_group=GENERATE)
    def generate(self, requests: Packed[GenerationRequest]) -> Packed[Completion]:
        """See RolloutEngine.generate."""
        with self._counted():
            return Packed(self.engine.generate(requests.objects()))

    @ray.method(concurrency_group=GENERATE, num_returns="streaming")
    def generate_each(self, requests: Packed[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        """See EngineWorker."""
        with self._counted():
            yield from self.engine.generate_each(requests.objects())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a call that samples as running inside the `with`."""
        with self._lock:
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1

    def score(self, sequences: list[ModelInput]) -> list[list[float]]:
        """See RolloutEngine.score."""
        return self.engine.score(sequences)

    def score_with_routes(self, sequences: list[ModelInput]) -> list[Scored]:
        """See RolloutEngine.score_with_routes."""
        return self.engine.score_with_routes(sequences)

    def top(self, sequences: list[ModelInput], k: int) -> "list[TopLogprobs]":
        """See RolloutEngine.top."""
        return self.engine.top(sequences, k)

    def receive(self, version: int) -> "list[Received]":
        """Receives the weights of `version` while running requests pause. They are unverified until `commit`."""
        from rlframe.weight_sync.border import DestinationRank  # not at the head: see there

        self.engine.gate.begin(version)
        # Requests that arrive from here on wait at the gate; those that have passed it are counted.
        if self._num_running:
            self.engine.pause()
        if self._asleep:
            self.engine.wake_weights()
        received = self.engine.on_ranks([RankCall.of(DestinationRank.receive)] * self._num_ranks)
        self.engine.weights_lost = False
        return received

    def commit(self, version: int) -> None:
        """Records that the driver has proved the engine to hold `version`, so that it may sample."""
        # Before the gate opens: a new request must not hit a cached prefix that older weights computed.
        if not self._asleep:
            self.engine.resume()
        self.engine.gate.commit(version)

    @ray.method(concurrency_group=SIGNALS)
    def fail(self, reason: str) -> None:
        """Records that the weights are of no known version. New requests are refused with `reason`; running ones return
        the tokens that earlier weights sampled."""
        self.engine.gate.fail(reason)
        if self._num_running:
            self.engine.abort()

    def on_ranks(self, calls: "Sequence[RankCall[DestinationRank, T]]") -> list[T]:
        """See RolloutEngine.on_ranks."""
        return self.engine.on_ranks(calls)

    def pause(self) -> None:
        """See RolloutEngine.pause."""
        self.engine.pause()

    def resume(self) -> None:
        """See RolloutEngine.resume."""
        self.engine.resume()

    @ray.method(concurrency_group=SIGNALS)
    def abort(self, names: Collection[str] | None = None) -> None:
        """See RolloutEngine.abort."""
        self.engine.abort(names)

    @ray.method(concurrency_group=SIGNALS)
    def is_alive(self) -> bool:
        """See RolloutEngine.is_alive."""
        return self.engine.is_alive()

    @ray.method(concurrency_group=SIGNALS)
    def drafts(self) -> Drafts:
        """See EngineWorker."""
        found = self.engine.drafts()
        new, self._drafts = found - self._drafts, found
        return new

    def sleep(self) -> Slept:
        """See RolloutEngine.sleep. Does nothing if the engine sleeps already."""
        if not self._asleep:
            self._end_requests()
            self.engine.sleep()
        self._asleep = True
        if self.engine.weights_lost:
            self.engine.gate.fail("a sleep dropped them, and no sync has restored them")
        return Slept(weights_lost=self.engine.weights_lost, freed_bytes=self.engine.freed_bytes)

    def _end_requests(self) -> None:
        """Ends what is left of attempts that were given up, whose aborts may still be on their way."""
        deadline = time.monotonic() + END_S
        while self._num_running and time.monotonic() < deadline:
            self.engine.abort()
            time.sleep(0.01)

    def wake_weights(self) -> None:
        """See RolloutEngine.wake_weights."""
        self.engine.wake_weights()

    def wake(self) -> None:
        """See RolloutEngine.wake. Drops caches, so that nothing computed before the sleep is used with weights synced
        during it."""
        self.engine.wake()
        self._asleep = False
        self.engine.resume()

    @ray.method(concurrency_group=SIGNALS)
    def close(self) -> None:
        """See RolloutEngine.close."""
        self.engine.close()


def end_processes(processes: Sequence[tuple[int, float]], patience_s: float = 10.0) -> None:
    """Kills a dead engine's processes on this machine and waits until their memory is free. Runs as a Ray task.

    Args:
        processes: as `RolloutWorker.start` returned them.
    """
    left = []
    for pid, created in processes:
        try:
            process = psutil.Process(pid)
            # Another process may have received the pid since.
            if process.create_time() == created:
                process.kill()
                left.append(process)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=patience_s)
