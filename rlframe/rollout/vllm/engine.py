"""vLLM as a rollout engine: AsyncLLM in the process of the Ray actor, with vLLM's core and workers in processes of
their own.

Every control call and request runs in one asyncio loop, which has a thread of its own. The methods of `VllmEngine`
block and may be called from many threads.
"""

import asyncio
import concurrent.futures
import importlib.util
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar, TypeVarTuple

import torch

from rlframe.cluster.profiling.request import Request
from rlframe.models.hub import load_family, read_config
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.base.engine import ProfilesItself
from rlframe.rollout.base.routes import Routers
from rlframe.rollout.base.speculative import Drafts
from rlframe.rollout.served.engine import WEIGHTS, ServedEngine, taken
from rlframe.rollout.served.pending import PendingRequest, top_logprobs
from rlframe.rollout.served.profiles import collected
from rlframe.rollout.vllm.adapter import lora_request
from rlframe.rollout.vllm.border import Extension
from rlframe.rollout.vllm.config import PROFILER_CONFIG, VllmConfig
from rlframe.rollout.vllm.decode.runner import runs_first
from rlframe.rollout.vllm.fetch import Fetcher
from rlframe.rollout.vllm.launch import (
    architectures_in,
    early_program,
    engine_arguments,
    launch,
    register_here,
)
from rlframe.rollout.vllm.line import Line, by_line, called
from rlframe.rollout.vllm.pending import follow, score, top
from rlframe.types.batch import TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, Scored
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import EngineDied, WeightSyncFailed
from rlframe.utils.process.early import EarlyProcess, EarlyProgram
from rlframe.weight_sync.border import DestinationRank

T = TypeVar("T")
Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")
POLL_S = 1.0
"""Seconds between two checks of a waiting call whether the engine is still alive."""
ABORT_S = 0.005
"""Seconds after which an abort is repeated, for requests that had not reached vLLM the first time."""
DEATH_GRACE_S = 5.0
"""Seconds that vLLM may take to fail the requests of a dead engine, before rlframe fails them."""
DEATH_NOTICE_S = 20.0
"""Seconds that vLLM may take to say that it is dead, after a call has failed because a worker has died. It ends the
other workers first: up to 9 s (vLLM 0.32, `MultiprocExecutor.shutdown`)."""


class VllmEngine(ServedEngine, ProfilesItself):
    """One vLLM engine of `tp` devices."""

    _early: ClassVar[EarlyProcess | None] = None
    """The process of the core of the engine that is made next."""

    @classmethod
    def ahead(cls, config: VllmConfig, *, folder: Path, device: str) -> EarlyProgram:
        assert importlib.util.find_spec("vllm") is not None, "rollout.name=vllm is checked with the configuration"
        return early_program(config, folder=folder, cuda=device != "cpu")

    @classmethod
    def prepare(cls, config: VllmConfig, *, folder: Path, device: str, early: EarlyProcess | None = None) -> None:
        """Imports vLLM here and in the process of its core, at the same time."""
        early = early or cls.ahead(config, folder=folder, device=device).start()
        importlib.import_module("vllm.v1.engine.async_llm")
        register_here(architectures_in(folder))
        VllmEngine._early = early

    def __init__(
        self,
        config: VllmConfig,
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
        """Starts vLLM's processes and loads the model through vLLM's own full path.

        Args:
            folder: model and tokenizer in Hugging Face format.
            device: "cuda" or "cpu".
            random_seed: seed from which the weights are drawn; the folder then needs none.
            with_routes: completions carry their routed experts.
            adapter: adapters of every request, whose values weight sync brings.
            float32_logits: see ModelConfig.
            with_mtp: see RolloutEngine.

        Raises:
            ConfigError: `engine_options` holds an argument unknown to vLLM.
        """
        if VllmEngine._early is None:
            self.prepare(config, folder=folder, device=device)
        early, VllmEngine._early = VllmEngine._early, None
        assert early is not None, "`prepare` starts it"
        super().__init__(config, folder=folder, cuda=device != "cpu")
        self._routers = Routers.of(load_family(folder).architecture(read_config(folder))) if with_routes else None
        self._paused = False
        self._emptying: asyncio.Task[bool] | None = None
        """Empties the prefix cache during a sync that is not committed yet."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        arguments = engine_arguments(
            config,
            folder=folder,
            dtype=dtype,
            cuda=self._cuda,
            random_seed=random_seed,
            with_routes=with_routes,
            adapter=adapter,
            float32_logits=float32_logits,
            with_mtp=with_mtp,
        )
        self._lora = lora_request() if adapter is not None else None
        self._engine: Any = asyncio.run_coroutine_threadsafe(launch(arguments, early), self._loop).result()
        self.max_length = self._engine.vllm_config.model_config.max_model_len
        self._rpc(Extension.rlframe_start, pickle.dumps(adapter), with_mtp)
        # With vLLM's own check of drafts, which is model runner V2's, vLLM returns logprobs itself.
        records = config.speculative is None or runs_first()
        assert records or not with_routes, "router replay with drafts is refused with the configuration"
        self._lines, taking = self._lines_to_workers()
        call = partial(self._each_rank, Extension.rlframe_take)
        self._fetcher = Fetcher(by_line(taking, call) if taking else call) if records else None

    def _lines_to_workers(self) -> tuple[list[Line], Line | None]:
        """Returns the lines to all ranks, none if they have no processes of their own, and that to the rank that has
        the records. None if it does not answer there."""
        if not self.config.num_worker_processes(cuda=self._cuda):
            return [], None
        addresses, takes = zip(*map(pickle.loads, self._rpc(Extension.rlframe_line)), strict=True)
        if not all(addresses):
            return [], None
        lines = [self._wait(Line.to(each), doing="line to a worker") for each in addresses]
        return lines, lines[takes.index(True)] if any(takes) else None

    def generate_each(self, requests: list[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        with self._admitted(requests) as admitted:
            for pending in admitted:
                pending.epoch = self._epoch if self._keeps else 0
            ended: SimpleQueue[list[int]] = SimpleQueue()
            future, doing = self._begin(self._follow(admitted, ended)), f"generation of {len(admitted)} responses"
            future.add_done_callback(lambda _: ended.put([]))
            is_last = False
            while not is_last:
                pieces = self._outlive(future, partial(taken, ended), doing=doing)
                is_last = [] in pieces
                if indices := list(itertools.chain.from_iterable(pieces)):
                    yield [(index, admitted[index].completion()) for index in indices]
            self._result(future, doing=doing)

    async def _follow(self, admitted: list[PendingRequest], ended: "SimpleQueue[list[int]]") -> None:
        """Waits for the ends of requests, and puts the indices of those that end in one turn of the loop together."""
        together: list[int] = []

        def put() -> None:
            ended.put(together.copy())
            together.clear()

        async def one(index: int, pending: PendingRequest) -> None:
            await follow(
                pending,
                self._engine,
                stop_tokens=self.stop_tokens,
                tokenizer=self.tokenizer,
                fetcher=self._fetcher,
                routers=self._routers,
                lora=self._lora,
            )
            together.append(index)
            if len(together) == 1:
                self._loop.call_soon(put)

        async with asyncio.TaskGroup() as group:
            for index, pending in enumerate(admitted):
                group.create_task(one(index, pending))

    def score(self, sequences: list[ModelInput]) -> list[list[float]]:
        with self._scoring(sequences):
            scores = self._wait(self._score(sequences), doing=f"scores of {len(sequences)} sequences")
        return [each.logprobs for each in scores]

    def score_with_routes(self, sequences: list[ModelInput]) -> list[Scored]:
        with self._scoring(sequences):
            work = self._score(sequences, self._routers)
            return self._wait(work, doing=f"scores of {len(sequences)} sequences")

    async def _score(self, sequences: list[ModelInput], routers: Routers | None = None) -> list[Scored]:
        async def one(sequence: ModelInput) -> Scored:
            if len(sequence) == 1:
                return Scored(logprobs=[])
            name = self._name("score")
            return await score(
                sequence, self._engine, name=name, routers=routers, fetcher=self._fetcher, lora=self._lora
            )

        return list(await asyncio.gather(*map(one, sequences)))

    def top(self, sequences: list[ModelInput], k: int) -> list[TopLogprobs]:
        with self._scoring(sequences):
            return self._wait(self._top(sequences, k), doing=f"the most likely tokens of {len(sequences)} sequences")

    async def _top(self, sequences: list[ModelInput], k: int) -> list[TopLogprobs]:
        async def one(sequence: ModelInput) -> TopLogprobs:
            if len(sequence) == 1:
                return top_logprobs(torch.zeros(0, k), torch.zeros(0, k))
            return await top(sequence, self._engine, name=self._name("score"), k=k, lora=self._lora)

        return list(await asyncio.gather(*map(one, sequences)))

    def drafts(self) -> Drafts:
        return max(map(pickle.loads, self._rpc(Extension.rlframe_drafts)), key=lambda each: each.num_checks)

    def on_ranks(self, calls: Sequence[RankCall[DestinationRank, T]]) -> list[T]:
        assert len(calls) == self.config.tp, f"expected one call for each of {self.config.tp} ranks, got {len(calls)}"
        receives = calls[0].method is DestinationRank.receive
        make = self._receive if receives else partial(self._each_rank, Extension.rlframe_call)
        answers = self._wait(make([pickle.dumps(each) for each in calls]), doing=calls[0].name)
        return self._results(map(pickle.loads, answers), received=receives)

    async def _receive(self, calls: list[bytes]) -> list[bytes]:
        """Makes calls to receive weights. If no request runs, none can begin before `resume`: a step that is still
        under way computes tokens that nobody reads, so that nothing waits for it, and vLLM empties the prefix cache
        meanwhile."""
        answers, self._emptying, idle = None, None, not self._running()
        if idle and not self._asleep:
            self._emptying = asyncio.create_task(self._engine.reset_prefix_cache())
            # It is sent first: vLLM's core would not look at it before the end of a call.
            await asyncio.sleep(0)
        if idle and self._lines:
            answers = await called(self._lines, calls)
        return answers or await self._each_rank(Extension.rlframe_call, calls)

    def pause(self) -> None:
        self._scores_done()
        if self._running() and not self._paused:
            # Not AsyncLLM.pause_generation: it sleeps 20 ms afterwards so that outputs arrive. `resume` waits for them
            # instead, when the wait costs nothing.
            # Emptying the cache takes the keys and values of running requests too.
            pause = self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=not self._keeps)
            self._wait(pause, doing="pause")
            self._paused = True

    def resume(self) -> None:
        self._wait(self._resume(self.gate.version), doing="resume")

    async def _resume(self, version: int | None) -> None:
        if self._keeps:
            # Requests hold blocks of the cache, which cannot be emptied then. New ones get another salt instead.
            self._epoch += 1
        elif not await self._is_emptied() and not await self._engine.reset_prefix_cache():
            raise WeightSyncFailed("vLLM did not empty its prefix cache: a request still holds blocks of it")
        if not self._paused:
            return
        await self._drain()
        for pending in self._running():
            assert version is not None, "running requests have a version"
            pending.mark(version, start=self._num_sampled(pending))
        if self._keeps:
            await self._begin_again()
        self._paused = False
        await self._engine.resume_generation()

    async def _is_emptied(self) -> bool:
        """Returns whether the prefix cache was emptied in this sync."""
        emptying, self._emptying = self._emptying, None
        return emptying is not None and await emptying

    async def _begin_again(self) -> None:
        """Sends requests without a token to vLLM again, in the present epoch. Those that wait in vLLM's queue would
        otherwise begin with a prefix that older weights have computed for others."""
        again = [pending for pending in self._running() if not self._num_sampled(pending) and not pending.ended]
        for pending in again:
            pending.epoch = self._epoch
        if again:
            await self._engine.abort([pending.name for pending in again])

    def _num_sampled(self, pending: PendingRequest) -> int:
        """Returns the number of tokens of a request that have arrived in this process. vLLM passes on those of most
        requests when they have ended."""
        known = self._engine.output_processor
        states = [known.request_states.get(name) for name in known.external_req_ids.get(pending.name, ())]
        return max([len(pending.token_ids), *(each.detokenizer.num_output_tokens() for each in states if each)])

    async def _drain(self) -> None:
        """Waits until every token sampled before the pause has arrived in this process."""
        # The core sends its outputs before it answers the pause, so they are in this queue or already taken from it.
        # They then pass vLLM's output task, in batches of 128 requests, and at the end the request's own task.
        queue = self._engine.engine_core.outputs_queue
        for _ in range(64):
            while not queue.empty():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)

    def abort(self, names: Collection[str] | None = None) -> None:
        ending = self._to_abort(names)
        for pending in ending:
            pending.aborted = True
        if ending:
            self._wait(self._abort(ending), doing="abort")

    async def _abort(self, ending: list[PendingRequest]) -> None:
        while ending:
            await self._engine.abort([pending.name for pending in ending])
            await asyncio.sleep(ABORT_S)
            # vLLM ignores the abort of a request that is still on its way to it.
            left = {pending.name for pending in self._to_abort(None)}
            ending = [pending for pending in ending if pending.name in left]

    def sleep(self) -> None:
        assert not self._running(), "sleep while requests are running"
        if not self._cuda:
            self._wait(self._engine.reset_prefix_cache(), doing="sleep")
            return
        before = sum(self._rpc(Extension.rlframe_free_bytes))
        self._wait(self._engine.sleep(level=self.config.sleep_level, mode="keep"), doing="sleep")
        self._slept(sum(self._rpc(Extension.rlframe_free_bytes)) - before)

    def _restore(self, tag: str) -> None:
        self._wait(self._engine.wake_up(tags=[tag]), doing="wake")
        if tag == WEIGHTS and self.weights_lost:
            self._rpc(Extension.rlframe_refill)

    def begin_profile(self, request: Request) -> None:  # noqa: ARG002 - the folder is known from the start
        self._wait(self._engine.start_profile(), doing="start of the profile")

    def end_profile(self, request: Request) -> list[Path]:
        self._wait(self._engine.stop_profile(), doing="end of the profile")
        written = self.config.engine_options[PROFILER_CONFIG].get("torch_profiler_dir")
        return collected(Path(written), request) if written else []

    def is_alive(self) -> bool:
        return not self._closed and not self._broken and not self._engine.errored

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for line in self._lines:
            self._loop.call_soon_threadsafe(line.close)
        self._engine.shutdown()
        # vLLM's finalizer shuts the engine down again. Run it here, not at the end of the interpreter.
        del self._engine
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _rpc(self, method: Callable[[Extension, *Ts], T], *arguments: *Ts) -> list[T]:
        """Calls a method of every rank's worker and returns the answers."""
        return self._wait(self._each_rank(method, *arguments), doing=method.__name__)

    def _each_rank(self, method: Callable[[Extension, *Ts], T], *arguments: *Ts) -> Coroutine[Any, Any, list[T]]:
        """Returns a coroutine that calls a method of every rank's worker, for the engine's loop."""
        return self._engine.collective_rpc(method.__name__, args=arguments)

    def _wait(self, work: Coroutine[Any, Any, Any], *, doing: str) -> Any:
        """Runs `work` in the engine's loop and returns its result.

        Raises:
            EngineDied: vLLM's processes ended.
        """
        future = self._begin(work)

        def done(timeout_s: float) -> bool:
            return bool(concurrent.futures.wait([future], timeout=timeout_s).done)

        self._outlive(future, done, doing=doing)
        return self._result(future, doing=doing)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Runs `work` in the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _outlive(
        self, future: "concurrent.futures.Future[Any]", wait: Callable[[float], Result], *, doing: str
    ) -> Result:
        """Returns the first result of `wait` that is not empty. `wait` is called with a limit in seconds.

        Raises:
            EngineDied: vLLM's processes ended, and vLLM has not failed `future` for a while.
        """
        died_at = None
        while not (found := wait(POLL_S)):
            if not future.done() and self._engine.errored:
                died_at = died_at or time.monotonic()
                if time.monotonic() > died_at + DEATH_GRACE_S:
                    future.cancel()
                    raise self._died(doing)
        return found

    def _result(self, future: "concurrent.futures.Future[Any]", *, doing: str) -> Any:
        """Returns the result of work that is done.

        Raises:
            EngineDied: vLLM's processes ended.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        error = future.exception()
        # The error of one request, after which the task group has cancelled the others.
        first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        if isinstance(first, EngineDeadError) or (type(first) is Exception and self._is_dying()):
            raise self._died(doing) from error
        if first is not None and first is not error:
            raise first from error
        return future.result()

    def _is_dying(self) -> bool:
        """Returns whether vLLM is dead, or says so soon. To be asked when it has failed a call, which it does with an
        Exception that names no kind: until it says so the engine would be taken for alive, and not be restarted."""
        deadline = time.monotonic() + DEATH_NOTICE_S
        while not self._engine.errored and time.monotonic() < deadline:
            time.sleep(ABORT_S)
        return bool(self._engine.errored)

    def _died(self, doing: str) -> EngineDied:
        return EngineDied(
            f"the vLLM engine of process {os.getpid()} ({self.folder.name}, {self.config.tp} ranks) died during "
            f"{doing}; see vLLM's messages above in this worker's log"
        )


async def _cancel_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
