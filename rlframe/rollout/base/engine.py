"""The abstract class of rollout engines. vLLM, SGLang and transformers differ only behind its methods."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from rlframe.cluster.profiling.request import Request
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.base.gate import VersionGate
from rlframe.rollout.base.speculative import Drafts
from rlframe.types.batch import TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, Scored
from rlframe.utils.calls import RankCall
from rlframe.utils.process.early import EarlyProgram
from rlframe.weight_sync.border import DestinationRank

T = TypeVar("T")


class ProfilesItself(ABC):
    """Base, beside RolloutEngine, of engines that compute in other processes and have a profiler of their own there."""

    @abstractmethod
    def begin_profile(self, request: Request) -> None:
        """Begins to record the engine's processes. Its config is one that `RolloutConfig.profiled` returned."""

    @abstractmethod
    def end_profile(self, request: Request) -> list[Path]:
        """Ends the record, and returns the files of it that are written."""


class RolloutEngine(ABC):
    """Base of all engines. An engine's file ends `COMPONENT, CONFIG = TheEngine, TheConfig`.

    Every engine obeys two rules: it samples only at a verified version, and every completion names the version of each
    of its tokens. The first rule is enforced by `gate.enter()`, which `generate` and `score` call before they sample.

    Control calls (`on_ranks`, `pause`, `resume`, `abort`, `is_alive`) may come from another thread than a `generate`
    that is running.
    """

    max_calls: ClassVar[int] = 1
    """Number of `generate` calls the engine accepts at the same time, each from a thread of its own. With 1, the caller
    passes all requests in one call and the engine batches within it."""
    gate: VersionGate
    """Version of the weights and whether it is verified. The caller updates it with each sync; the engine checks it
    before it samples."""
    weights_lost: bool = False
    """True between a sleep that dropped the weights and the next sync. The memory of the weights is undefined
    meanwhile."""
    freed_bytes: int | None = None
    """Bytes of device memory that the last `sleep` freed, over all ranks of the engine. None if not measured."""

    @classmethod
    def ahead(cls, config: Any, *, folder: Path, device: str) -> EarlyProgram | None:  # noqa: ARG003 - for subclasses
        """Returns what a process of the engine begins with as soon as the engine's actor runs, before that imports
        torch; `prepare` then gets the process as `early`. None if the engine has no such process. Called by the driver.
        """
        return None

    @classmethod  # noqa: B027 - most engines need nothing
    def prepare(cls, config: Any, *, folder: Path, device: str) -> None:  # noqa: ARG003 - for subclasses
        """Does what the next engine of this process needs and what takes no memory of a device, such as imports.

        Subclasses override it if that takes seconds.
        """

    @abstractmethod
    def __init__(
        self,
        config: Any,
        *,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        random_seed: int | None = None,
        with_routes: bool = False,
        adapter: EngineAdapter | None = None,
        float32_logits: bool = False,
        with_mtp: bool = False,
    ):
        """Loads the model the way the engine itself loads it, so that calibration compares what the engine really
        holds.

        Args:
            config: an instance of the file's CONFIG.
            folder: model and tokenizer in Hugging Face format.
            random_seed: seed from which the weights are drawn (`models.random_init`); the folder then needs none.
            with_routes: completions carry their routed experts; requires that `config.route_faults` yields nothing.
            adapter: adapters that the ranks' WeightDestinations receive in the place of the weights; requires that
                `config.adapter_faults` yields nothing.
            float32_logits: logits stay in float32, see ModelConfig; requires that `config.float32_logits_faults` yields
                nothing.
            with_mtp: the ranks' WeightDestinations receive the head for multi-token prediction with which the engine
                drafts too; requires `config.speculative` with method=mtp.
        """

    @abstractmethod
    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Returns one completion for each request, in their order. Thread-safe if `max_calls` is above 1.

        A request with a `first_position` goes on with a response that an earlier request began. Under the same weights
        both together have the tokens of one request that is not interrupted.

        Raises:
            WeightSyncFailed: the weights in memory are not verified.
            EngineDied: a process of the engine ended; the engine must be rebuilt.
            ValueError: a prompt is empty, prompt and response exceed the model's positions, or a running request has
                the same name.
        """

    def generate_each(self, requests: list[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        """Yields the completions of `generate` as responses end, each with the index of its request. Those that end
        together come together."""
        yield list(enumerate(self.generate(requests)))

    @abstractmethod
    def score(self, sequences: list[ModelInput]) -> list[list[float]]:
        """Returns for each sequence the nats of each token but the first, given the tokens before it, under
        log_softmax(logits).

        Uses temperature 1 and filters nothing, whatever the sampling settings. A trainer computes the same at
        temperature 1.

        Raises:
            WeightSyncFailed: the weights in memory are not verified.
        """

    def score_with_routes(self, sequences: list[ModelInput]) -> list[Scored]:
        """Returns what `score` does, with the experts that the same pass chose.

        Subclasses override it if their engine tells those of given tokens.
        """
        return [Scored(logprobs=nats) for nats in self.score(sequences)]

    @abstractmethod
    def top(self, sequences: list[ModelInput], k: int) -> list[TopLogprobs]:
        """Returns for each sequence the k most likely tokens in the place of each token but the first, computed as in
        `score`.

        Raises:
            WeightSyncFailed: the weights in memory are not verified.
        """

    def drafts(self) -> Drafts:
        """Returns what became of the drafts of speculative decoding since the engine started."""
        return Drafts()

    @abstractmethod
    def on_ranks(self, calls: Sequence[RankCall[DestinationRank, T]]) -> list[T]:
        """Calls each rank's WeightDestination, all ranks at once, and returns the answers.

        Args:
            calls: one for each rank: 1 for an engine of one process, tp for a tensor-parallel one.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stops running requests where they are and keeps their tokens. Returns when none is computing any more.

        After `resume` they continue. The keys and values of their prefix are recomputed with the weights of that time,
        or kept as they are (`RolloutConfig.cache_after_sync`).
        """

    @abstractmethod
    def resume(self) -> None:
        """Undoes `pause`. Requests that begin from here on reuse nothing that earlier weights computed, the prefix
        cache included."""

    @abstractmethod
    def abort(self, names: Collection[str] | None = None) -> None:
        """Makes running requests return, with finish_reason ABORT and the tokens they have.

        A request that waits at the gate for the end of a sync is not running yet. Where one call has many requests it
        returns when the last of them has ended.

        Args:
            names: names of the requests. Those that do not run are ignored. None aborts every running request.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Frees memory that can be rebuilt, so that training can use the device. Sets `weights_lost` if the weights are
        dropped too, and `freed_bytes` if it is measured."""

    @abstractmethod
    def wake_weights(self) -> None:
        """Gives the weights memory again, ready for a sync. Its content is undefined if `sleep` dropped the weights."""

    @abstractmethod
    def wake(self) -> None:
        """Undoes `sleep`: weights and caches have memory again."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Returns False if a process of the engine has ended, so that the engine must be rebuilt."""

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and processes. The engine must not be used afterwards."""


def check_names(requests: Iterable[GenerationRequest], running: Iterable[str] = ()) -> None:
    """Checks that each request that has a name is the only one of it.

    Args:
        running: names of the requests that run already.

    Raises:
        ValueError: two requests have one name.
    """
    taken = set(running)
    for name in (request.name for request in requests if request.name):
        if name in taken:
            raise ValueError(f"the name of a request must be unique among running requests, got {name!r} twice")
        taken.add(name)
