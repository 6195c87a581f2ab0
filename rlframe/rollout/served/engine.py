"""ServedEngine: the part of engines with processes of their own that does not depend on the engine."""

import itertools
import logging
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, TypeVar

from rlframe.models import tokenizer
from rlframe.rollout.base.config import CacheAfterSync
from rlframe.rollout.base.engine import RolloutEngine, check_names
from rlframe.rollout.base.gate import VersionGate
from rlframe.rollout.served.pending import PendingRequest
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest

T = TypeVar("T")
logger = logging.getLogger(__name__)

WEIGHTS, CACHE = "weights", "kv_cache"
"""The kinds of memory that sleep frees, by the names that vLLM and SGLang use."""


class ServedEngine(RolloutEngine):
    """Tracks running requests and sleeping memory. Its methods block and are called from many threads."""

    max_calls: ClassVar[int] = 1024
    max_length: int
    """Greatest number of tokens of a sequence, prompt and response."""

    def __init__(self, config: Any, *, folder: Path, cuda: bool):
        """Reads the tokenizer; the subclass starts the processes."""
        self.config = config
        self.folder = folder
        self.gate = VersionGate()
        self.tokenizer = tokenizer.load(folder)
        self.stop_tokens = tokenizer.stop_token_ids(folder, self.tokenizer)
        self._cuda = cuda
        self._names = itertools.count()
        self._pending: dict[str, PendingRequest] = {}
        """Running requests by name."""
        self._epoch = 1
        """Number of times that requests could have kept keys and values over a sync, from 1."""
        self._num_scores = 0
        self._changed = threading.Condition()
        """Guards `_pending` and `_num_scores`."""
        self._asleep: set[str] = set()
        """The kinds of memory, of WEIGHTS and CACHE, that `sleep` has freed."""
        self._broken = False
        """True if a reload was interrupted, which leaves the model between two versions."""
        self._closed = False

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        found = dict(itertools.chain.from_iterable(self.generate_each(requests)))
        return [found[index] for index in range(len(requests))]

    @abstractmethod
    def generate_each(self, requests: list[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        """See RolloutEngine."""

    @contextmanager
    def _admitted(self, requests: list[GenerationRequest]) -> Iterator[list[PendingRequest]]:
        """Yields a pending for each request, counted as running inside the `with`, after the weights are verified."""
        for request in requests:
            self._check(request)
        admitted: list[PendingRequest] | None = None
        while admitted is None:
            version = self.gate.enter()
            with self._changed:
                # A sync that began in the meantime has seen no running request, and will not wait for this one.
                if self.gate.verified and self.gate.version == version:
                    check_names(requests, [each.request.name for each in self._pending.values() if not each.ended])
                    admitted = [
                        PendingRequest(request, name=self._name("generate"), version=version) for request in requests
                    ]
                    self._pending |= {pending.name: pending for pending in admitted}
        try:
            yield admitted
        finally:
            with self._changed:
                for pending in admitted:
                    del self._pending[pending.name]

    def _check(self, request: GenerationRequest) -> None:
        if not len(request.input):
            raise ValueError("a prompt must have at least 1 token, got 0")
        prompt, response = request.prompt_tokens, request.sampling.max_tokens
        if prompt + response > self.max_length:
            raise ValueError(
                f"rollout.max_tokens: a prompt of {prompt} tokens and a response of {response} exceed the "
                f"{self.max_length} positions of the engine"
            )

    def _name(self, kind: str) -> str:
        # SGLang aborts every request whose name begins with the given one, so no name may be a prefix of another.
        return f"{kind}-{next(self._names):012d}"

    def _running(self) -> list[PendingRequest]:
        with self._changed:
            return list(self._pending.values())

    def _to_abort(self, names: Collection[str] | None) -> list[PendingRequest]:
        """Returns the requests that have no last answer yet, of which `names` are the caller's names. None stands for
        all."""
        with self._changed:
            return [
                each
                for each in self._pending.values()
                if not each.ended and (names is None or (each.request.name and each.request.name in names))
            ]

    @property
    def _keeps(self) -> bool:
        """Returns whether running requests keep their keys and values over a sync."""
        return self.config.cache_after_sync is CacheAfterSync.KEEP

    @contextmanager
    def _scoring(self, sequences: list[ModelInput]) -> Iterator[None]:
        """Counts a score as running inside the `with`. A sync waits for it in `_scores_done`: half a score of each
        version is useless."""
        for sequence in sequences:
            if not 1 <= len(sequence) < self.max_length:
                raise ValueError(
                    f"{self.config.name} scores sequences of 1 to {self.max_length - 1} tokens (max_model_len less 1), "
                    f"got {len(sequence)}"
                )
        while True:
            version = self.gate.enter()
            with self._changed:
                if self.gate.verified and self.gate.version == version:
                    self._num_scores += 1
                    break
        try:
            yield
        finally:
            with self._changed:
                self._num_scores -= 1
                self._changed.notify_all()

    def _scores_done(self) -> None:
        """Waits until no score is running."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_scores == 0)

    def _results(self, answers: Iterable[tuple[Any, Exception | None, bool]], *, received: bool) -> list[Any]:
        """Returns the result of each rank, from its answer: result, failure, and whether its model is broken.

        Args:
            received: whether the call was one that writes weights.
        """
        results, failures, broken = zip(*answers, strict=True)
        self._broken = any(broken)
        if failure := next(filter(None, failures), None):
            raise failure
        if received:
            self.weights_lost = False
        return list(results)

    def _slept(self, freed_bytes: int) -> None:
        """Records that weights and cache have given their memory back."""
        self.freed_bytes = freed_bytes
        self._asleep = {WEIGHTS, CACHE}
        logger.info("sleep freed %.2f GiB over %d devices", freed_bytes / 2**30, self.config.tp)
        if self.config.sleep_level == 2:
            self.weights_lost = True
            self.gate.fail("its weights were dropped by sleep (rollout.sleep_level=2), and no sync has followed")

    def wake_weights(self) -> None:
        self._wake(WEIGHTS)

    def wake(self) -> None:
        # Workaround for vLLM 0.26, which restores the model's buffers on the first wake of any kind: the weights always
        # come first. Not needed any more once waking the cache alone leaves the buffers alone.
        self._wake(WEIGHTS)
        self._wake(CACHE)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._restore(tag)
            self._asleep.remove(tag)

    @abstractmethod
    def _restore(self, tag: str) -> None:
        """Gives WEIGHTS or CACHE memory again."""


def taken(items: "SimpleQueue[T]", timeout_s: float | None = None) -> list[T]:
    """Waits for an item and returns it with all others that are there. Returns none after `timeout_s`."""
    try:
        found = [items.get(timeout=timeout_s)]
    except Empty:
        return []
    return found + [items.get() for _ in range(items.qsize())]
