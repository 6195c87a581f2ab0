"""SGLang as a rollout engine: `sglang.Engine` in a process of its own, with its schedulers below that.

The methods of `SglangEngine` block and may be called from many threads; each sends a message to that process.
"""

import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar, TypeVarTuple

import torch

from rlframe.cluster.profiling.config import Tool
from rlframe.cluster.profiling.request import Request
from rlframe.models.hub import load_family, read_config
from rlframe.models.remote_code import is_trusted
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.base.engine import ProfilesItself
from rlframe.rollout.base.routes import Routers
from rlframe.rollout.served.engine import CACHE, WEIGHTS, ServedEngine, taken
from rlframe.rollout.served.pending import PendingRequest, spelled
from rlframe.rollout.served.profiles import collected
from rlframe.rollout.sglang.border import Answer, EngineHost, SchedulerRank
from rlframe.rollout.sglang.config import SglangConfig
from rlframe.rollout.sglang.launch import Host, Launch, engine_arguments
from rlframe.types.batch import TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FLUSH_S = 10.0
"""Seconds that SGLang may take to end the batch that runs when the last request finishes."""
ABORT_S = 0.02
"""Seconds after which an abort is repeated, for requests that had not reached the scheduler the first time."""


class SglangEngine(ServedEngine, ProfilesItself):
    """One SGLang engine of `tp` devices."""

    def __init__(
        self,
        config: SglangConfig,
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
        """Starts SGLang's processes and loads the model through SGLang's own full path.

        Args:
            folder: model and tokenizer in Hugging Face format.
            device: "cuda" or "cpu".
            random_seed: seed from which the weights are drawn; the folder then needs none.
            with_routes: completions carry their routed experts. Requests must have no stop strings.
            float32_logits: see ModelConfig.

        Raises:
            ConfigError: `engine_options` holds an argument unknown to SGLang.
            EngineDied: SGLang did not start.
        """
        assert adapter is None, "`config.adapter_faults` is checked with the configuration"
        assert not with_mtp, "`config.speculative_faults` is checked with the configuration"
        super().__init__(config, folder=folder, cuda=device != "cpu")
        architecture = load_family(folder).architecture(read_config(folder))
        self.max_length = config.max_model_len or architecture.max_positions
        self._aborting = threading.Lock()
        self._left: dict[str, tuple[list[int], list[float]]] = {}
        """Tokens and logprobs of aborted requests whose answers have fewer. Guarded by `_aborting`."""
        arguments = engine_arguments(
            config,
            folder=folder,
            architecture=architecture,
            dtype=dtype,
            cuda=self._cuda,
            stop_tokens=self.stop_tokens,
            random_seed=random_seed,
            with_routes=with_routes,
            float32_logits=float32_logits,
        )
        self._host = Host(
            Launch(
                arguments=arguments,
                stop_tokens=self.stop_tokens,
                tokenizer=str(folder),
                trusted=is_trusted(folder),
                routers=Routers.of(architecture) if with_routes else None,
            ),
            doing=f"the SGLang engine of process {os.getpid()} ({folder.name}, {config.tp} ranks)",
        )

    def generate_each(self, requests: list[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        with self._admitted(requests) as admitted:
            ended: SimpleQueue[int] = SimpleQueue()
            calls = [self._generate(pending) for pending in admitted]
            for index, call in enumerate(calls):
                call.add_done_callback(lambda _, index=index: ended.put(index))
            num_left = len(admitted)
            try:
                while num_left:
                    indices = taken(ended)
                    num_left -= len(indices)
                    for index in indices:
                        self._finish(admitted[index], calls[index].result())
                    yield [(index, admitted[index].completion()) for index in indices]
            finally:
                with self._aborting:
                    for pending in admitted:
                        self._left.pop(pending.name, None)

    def _finish(self, pending: PendingRequest, answer: Answer) -> None:
        """Takes the answer to a request."""
        pending.take(*self._whole(pending.name, answer))
        pending.routes = answer.routes
        pending.finish(answer.finish_reason)
        # The host has searched the tokens of its answer only.
        first = len(answer.token_ids) + 1
        count = spelled(pending.token_ids, first=first, request=pending.request, tokenizer=self.tokenizer)
        if count is not None:
            pending.stop_at(count)

    def _generate(self, pending: PendingRequest) -> "Future[Answer]":
        """Sends a request and returns the future of its answer."""
        call = self._host.call(EngineHost.generate, pending.name, pending.request)

        def answered(_: "Future[Answer]") -> None:
            pending.ended = True

        call.add_done_callback(answered)
        return call

    def _whole(self, name: str, answer: Answer) -> tuple[list[int], list[float]]:
        """Returns tokens and logprobs of a request. For an aborted one these include those that its scheduler had and
        SGLang did not return."""
        if answer.finish_reason == FinishReason.ABORT:
            # The scheduler's own answer to the abort may still be on its way.
            with self._aborting:
                return self._left.get(name, (answer.token_ids, answer.logprobs))
        return answer.token_ids, answer.logprobs

    def score(self, sequences: list[ModelInput]) -> list[list[float]]:
        with self._scoring(sequences):
            calls = [
                self._host.call(EngineHost.score, self._name("score"), each) if len(each) > 1 else None
                for each in sequences
            ]
            return [call.result() if call else [] for call in calls]

    def top(self, sequences: list[ModelInput], k: int) -> list[TopLogprobs]:
        with self._scoring(sequences):
            calls = [self._host.call(EngineHost.top, self._name("score"), each, k) for each in sequences]
            return [call.result() for call in calls]

    def on_ranks(self, calls: Sequence[RankCall[DestinationRank, T]]) -> list[T]:
        assert len(calls) == self.config.tp, f"expected one call for each of {self.config.tp} ranks, got {len(calls)}"
        receives = calls[0].method is DestinationRank.receive
        if receives:
            # No request is computing, but a batch may still run whose requests are done.
            self.pause()
        return self._ask([RankCall.of(SchedulerRank.weights, call) for call in calls], receives=receives)

    def _ask(self, calls: Sequence[RankCall[SchedulerRank, T]], *, receives: bool = False) -> list[T]:
        """Calls a method of each scheduler, with an argument of its own, and returns the answers."""
        answers = self._host.call(EngineHost.ranks, str(calls[0]), [pickle.dumps(each) for each in calls]).result()
        return self._results(answers, received=receives)

    def _all(self, method: Callable[[SchedulerRank, *Ts], T], *arguments: *Ts) -> list[T]:
        """Calls a method of each scheduler with the same arguments and returns the answers."""
        return self._ask([RankCall.of(method, *arguments)] * self.config.tp)

    def pause(self) -> None:
        self._scores_done()
        self._all(SchedulerRank.pause, self._keeps)

    def resume(self) -> None:
        # Requests that keep their keys and values hold the prefix cache, which cannot be emptied then.
        if self._keeps:
            self._all(SchedulerRank.part)
        else:
            self._flush()
        # Messages keep their order, so the scheduler has received every request admitted before. A request that it does
        # not name is finished.
        counts, version = self._all(SchedulerRank.counts)[0], self.gate.version
        with self._changed:
            for name, count in counts.items():
                if name in self._pending:
                    assert version is not None, "running requests have a version"
                    self._pending[name].mark(version, start=count)
        self._all(SchedulerRank.proceed)

    def _flush(self) -> None:
        """Empties the prefix cache."""
        deadline = time.monotonic() + FLUSH_S
        while not all(self._all(SchedulerRank.flush)):
            if time.monotonic() > deadline:
                raise WeightSyncFailed("SGLang did not empty its prefix cache: a request still holds part of it")
            time.sleep(0.005)

    def abort(self, names: Collection[str] | None = None) -> None:
        left = {pending.name for pending in self._to_abort(names)}
        while left:
            with self._aborting:
                self._left |= self._all(SchedulerRank.abort, sorted(left), True)[0]
            time.sleep(ABORT_S)
            # A request that was still on its way to the scheduler when it was aborted would otherwise run to its end.
            left &= {pending.name for pending in self._to_abort(None)}

    def sleep(self) -> None:
        assert not self._running(), "sleep while requests are running"
        self._flush()
        if not self._cuda:
            return
        self._slept(sum(self._all(SchedulerRank.release, [WEIGHTS, CACHE])))

    def _restore(self, tag: str) -> None:
        self._all(SchedulerRank.restore, [tag])

    def checksums(self) -> list[dict[str, str]]:
        """Returns SGLang's own checksums of the weights in memory, by rank and by parameter.

        Raises:
            WeightSyncFailed: this SGLang has no checksums.
        """
        return self._all(SchedulerRank.checksums)

    def begin_profile(self, request: Request) -> None:
        kinds = {
            Tool.TORCH: ["CPU", "GPU"] if self._cuda else ["CPU"],
            Tool.NSYS: ["CUDA_PROFILER"],
            Tool.MEMORY: ["MEM"],
        }
        folder = str(self._profile_folder(request))
        self._host.call(EngineHost.begin_profile, folder, kinds[request.tool], request.stacks).result()

    def end_profile(self, request: Request) -> list[Path]:
        self._host.call(EngineHost.end_profile).result()
        return collected(self._profile_folder(request), request)

    def _profile_folder(self, request: Request) -> Path:
        """Returns the folder of SGLang's own files of a profile."""
        return Path(request.folder) / f".{request.name}"

    def is_alive(self) -> bool:
        return not self._closed and not self._broken and self._host.is_alive

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._host.close()
