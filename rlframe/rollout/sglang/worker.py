"""The code that runs inside SGLang's scheduler processes: the model loader, and a rank's ends of weight sync and of
control."""

import base64
import copy
import json
import logging
import pickle
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import zmq
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import (
    AbortReq,
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.model_executor.model_runner_components import load_model_utils
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import Tensor

from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import CacheFormat
from rlframe.rollout.served.quantized import formats, shapes
from rlframe.rollout.served.recording import (
    LoadNotes,
    checkpoint_tensors,
    formats_of,
    moved,
    places,
    record_model,
)
from rlframe.rollout.served.weights import FirstWeights
from rlframe.rollout.sglang import cache, epochs
from rlframe.rollout.sglang import sampler as sglang_sampler
from rlframe.rollout.sglang.border import SCHEDULER_CALL, SchedulerRank
from rlframe.rollout.sglang.layout import tie
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import RlframeError, WeightSyncFailed
from rlframe.utils.process.rendezvous import listen
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.endpoints import WeightDestination
from rlframe.weight_sync.layout.memory import MemoryLayout

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOTES = "rlframe_notes"
"""Attribute of the loaded model that holds its `LoadNotes`."""
SETTINGS = "rlframe"
"""Key in `model_loader_extra_config` of the settings of `RecordingLoader`."""


def run_rank(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any, **more: Any) -> None:
    """Runs SGLang's `run_scheduler_process` with rlframe's loader, sampler and calls."""
    settings = json.loads(server_args.model_loader_extra_config)[SETTINGS]
    sglang_sampler.install(settings["stop_tokens"])

    def loader(load_config: Any, model_config: Any = None) -> RecordingLoader:
        return RecordingLoader(load_config)

    load_model_utils.get_model_loader = loader

    def carry_out(scheduler: Any, *, calls: str, reply: str) -> None:
        """Executes a call in the scheduler's loop, between two batches, on all ranks. SGLang's RpcReqInput names it."""
        if not hasattr(scheduler, "rlframe_rank"):
            scheduler.rlframe_rank = Rank(scheduler, tp_rank)
        scheduler.rlframe_rank.carry_out(calls, reply)

    setattr(sglang_scheduler.Scheduler, SCHEDULER_CALL, carry_out)
    epochs.install(sglang_scheduler.Scheduler)
    # SGLang 0.5.23 lets torch create the ranks' store, which then listens on every interface. A store that exists is
    # shared instead.
    store = None
    if tp_rank == 0 and not server_args.dist_init_addr:
        store = listen(server_args.host, port_args.nccl_port)
    sglang_scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **more)
    # The store must live until here.
    del store


class RecordingLoader(DefaultModelLoader):
    """Loads safetensors with SGLang's own loader and records where every tensor lands; loads random weights, and what
    quantised ones stand for, on the same path.

    `model_loader_extra_config` holds under `SETTINGS` a `random_seed` or null: the weights are then those of
    `models.random_init`; `engine_format`, in which matrices are held; and `cache_format`, that of keys and values.
    """

    def __init__(self, load_config: Any):
        load_config = copy.copy(load_config)
        extra = load_config.model_loader_extra_config
        extra = dict(json.loads(extra) if isinstance(extra, str) else extra)
        settings = extra.pop(SETTINGS)
        self._random_seed: int | None = settings["random_seed"]
        self._format = EngineFormat(settings["engine_format"])
        self._cache_format = CacheFormat(settings["cache_format"])
        load_config.model_loader_extra_config = extra
        super().__init__(load_config)
        self._tensors: dict[str, tuple[int, ...]] = {}
        self._layout: MemoryLayout | None = None
        self._refusal = ""
        self._record_s = 0.0
        self._formats: dict[str, torch.dtype] = {}
        self._places: dict[str, tuple] = {}

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """Returns the model, loaded and post-processed by SGLang, with its `LoadNotes`."""
        self._tensors = dict(shapes(checkpoint_tensors(Path(model_config.model_path)), self._format))
        self._dtype = model_config.dtype
        self._hf_config = model_config.hf_config
        model = super().load_model(model_config=model_config, device_config=device_config)
        if self._layout is not None and (
            changed := moved(self._places, places(dict(model.named_parameters())), engine="SGLang")
        ):
            self._layout, self._refusal = None, changed
        notes = LoadNotes(
            self._tensors,
            frozenset(self._places),
            self._layout,
            self._refusal,
            self._record_s,
            self._formats,
            quantized=self._format is not EngineFormat.NONE,
        )
        setattr(model, NOTES, notes)
        if self._refusal:
            logger.info("weights arrive by reload, because this engine %s", self._refusal)
        return model

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        """Records the layout, then loads the weights."""
        tie(model, self._hf_config)
        write_cache_apart(model)
        if self._cache_format is not CacheFormat.AUTO:
            cache.saturate(model, torch.device(target_device))
        self._places = places(dict(model.named_parameters()))
        started = time.perf_counter()
        dtypes = formats(self._tensors, self._dtype) if self._format is not EngineFormat.NONE else None
        parameters = dict(model.named_parameters())
        self._layout, self._refusal = record_model(model.load_weights, parameters, self._tensors, dtypes)
        self._record_s = time.perf_counter() - started
        self._formats = formats_of(self._layout, dict(model.named_parameters()), self._tensors)
        super().load_weights_and_postprocess(model, weights, target_device)

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the checkpoint's tensors, or random ones, as this engine holds them."""
        first = FirstWeights(
            folder=Path(model_config.model_path),
            random_seed=self._random_seed,
            engine_format=self._format,
            dtype=self._dtype,
            layout=self._layout,
        )
        own = partial(super()._get_all_weights, model_config, model)
        yield from first.read(own, device=str(next(model.parameters()).device))


def write_cache_apart(model: Any) -> None:
    """Makes attention write its keys and values itself if SGLang's kernel for rotary embeddings cannot.

    Workaround for SGLang 0.5.17 to 0.5.23, which use that kernel for every Qwen3-MoE on CUDA (since
    https://github.com/sgl-project/sglang/pull/10749) and assert that heads have 64, 128, 256 or 512 channels. Not
    needed any more once a Qwen3-MoE with heads of another size starts on CUDA without it.
    """
    for module in model.modules():
        if getattr(module, "compatible_with_fused_kv_buffer", False) and module.rotary_emb.use_fallback_kernel:
            module.compatible_with_fused_kv_buffer = False


class Reload:
    """Loads whole tensors into a running engine by SGLang's own path."""

    def __init__(self, runner: Any, notes: LoadNotes):
        self._runner, self._notes = runner, notes
        self._arrived: set[str] = set()
        self._places: dict[str, tuple] = {}
        self.under_way = False
        """True from `begin` to the end of `finish`. The model is between two versions meanwhile, and stays so if an
        error came in between."""

    def begin(self) -> None:
        """Starts a reload.

        Raises:
            WeightSyncFailed: the last reload was interrupted.
        """
        if self.under_way:
            raise WeightSyncFailed("the last reload of SGLang was interrupted; the engine must be restarted")
        self.under_way = True
        self._arrived, self._places = set(), places(dict(self._runner.model.named_parameters()))
        # From SGLang 0.5.21 on: packed weights are unpacked for the time of a session.
        if hasattr(self._runner.weight_updater, "begin_weight_update"):
            self._runner.weight_updater.begin_weight_update()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads whole tensors by their names in the checkpoint, each once.

        Raises:
            WeightSyncFailed: SGLang refuses them.
        """
        tensors = list(tensors)
        self._arrived.update(name for name, _ in tensors)
        success, message = self._runner.weight_updater.update_weights_from_tensor(tensors, load_format=None)
        if not success:
            raise WeightSyncFailed(f"SGLang refused {tensors[0][0]} and the tensors sent with it: {message}")

    def finish(self) -> None:
        """Completes the session.

        Raises:
            WeightSyncFailed: a tensor of the checkpoint is missing, or a parameter was moved, so that captured CUDA
                graphs would read the old one.
        """
        if hasattr(self._runner.weight_updater, "end_weight_update"):
            self._runner.weight_updater.end_weight_update(run_post_load=True)
        if missing := self._notes.tensors.keys() - self._arrived:
            raise WeightSyncFailed(f"the reload of SGLang lacks {len(missing)} tensors, such as {min(missing)}")
        if changed := moved(self._places, places(dict(self._runner.model.named_parameters())), engine="SGLang"):
            raise WeightSyncFailed(f"the reload of SGLang moved parameters that CUDA graphs read: the engine {changed}")
        self.under_way = False


class Rank(SchedulerRank):
    """One rank of SGLang: its WeightDestination, and the calls that control its scheduler."""

    def __init__(self, scheduler: Any, rank: int):
        runner = scheduler.tp_worker.model_runner
        notes: LoadNotes = getattr(runner.model, NOTES)
        on_cpu = runner.device == "cpu"
        self._scheduler, self._rank = scheduler, rank
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        self._context = zmq.Context()
        self._reload = Reload(runner, notes)
        # Before SGLang 0.5.21 nothing repacks the weights after a stream.
        repacks = notes.layout is not None or hasattr(runner.weight_updater, "end_weight_update")
        self._destination = WeightDestination(
            notes.layout,
            dict(runner.model.named_parameters()),
            tensors=notes.tensors,
            dtype=runner.model_config.dtype,
            device=self._device,
            formats=notes.formats,
            refusal=notes.refusal,
            reload=self._reload if repacks and not notes.quantized else None,
            record_s=notes.record_s,
        )

    def carry_out(self, calls: str, reply: str) -> None:
        """Executes this rank's call and sends to the socket `reply`, pickled: the rank; the result; the error, or None;
        and whether a reload was interrupted.

        Args:
            calls: by rank, the pickled RankCall, all pickled, in base64: SGLang carries text and numbers.
        """
        call: RankCall[SchedulerRank, Any] = pickle.loads(pickle.loads(base64.b64decode(calls))[self._rank])
        result, failure = None, None
        try:
            result = call.on(self)
        except RlframeError as error:
            failure = error
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # The border of the process: SGLang would pass on only the text.
            logger.exception("weight sync: %s failed on SGLang rank %d", call, self._rank)
            failure = WeightSyncFailed(f"{call} on rank {self._rank} of SGLang: {error!r}")
        with self._context.socket(zmq.PUSH) as socket:
            socket.connect(reply)
            socket.send(pickle.dumps((self._rank, result, failure, self._reload.under_way)))

    def weights(self, call: RankCall[DestinationRank, T]) -> T:
        """See SchedulerRank."""
        return call.on(self._destination)

    def pause(self, keep: bool) -> None:
        """See SchedulerRank."""
        if self._scheduler._engine_paused:
            return
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="in_place" if keep else "retract"))
        if keep and self._device.type == "cuda":
            # A batch that was launched ahead still reads the weights.
            torch.cuda.synchronize(self._device)

    def counts(self) -> dict[str, int]:
        """See SchedulerRank."""
        found = {request.rid: len(request.output_ids) for request in self._unfinished()}
        # A pause in place leaves the result of a batch that was launched ahead, whose tokens the old weights sampled.
        for batch, _ in getattr(self._scheduler, "result_queue", ()):
            for request in batch.reqs:
                if request.rid in found and not request.is_retracted and request.inflight_middle_chunks <= 0:
                    found[request.rid] += 1
        return found

    def _unfinished(self) -> list[Any]:
        """Returns the requests that wait or run."""
        batches = (self._scheduler.running_batch, self._scheduler.last_batch)
        running = [request for batch in batches if batch is not None for request in batch.reqs]
        if self._scheduler.chunked_req is not None:
            running.append(self._scheduler.chunked_req)
        return [request for request in (*self._scheduler.waiting_queue, *running) if not request.finished()]

    def part(self) -> None:
        """See SchedulerRank."""
        epochs.begin(self._scheduler)

    def flush(self) -> bool:
        """See SchedulerRank."""
        # Up to SGLang 0.5.20 waiting requests, which hold none of the cache after they were retracted, prevent the
        # flush.
        waiting, self._scheduler.waiting_queue = self._scheduler.waiting_queue, []
        try:
            emptied = self._scheduler.flush_cache(empty_cache=False)
        finally:
            self._scheduler.waiting_queue = waiting
        return emptied

    def proceed(self) -> None:
        """Undoes `pause`. Waiting requests are recomputed, with the tokens they have, by the present weights."""
        if self._scheduler._engine_paused:
            self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def abort(self, names: list[str], now: bool) -> dict[str, tuple[list[int], list[float]]]:
        """See SchedulerRank."""
        if now and self._scheduler._engine_paused:
            # SGLang ends running requests with their next token, and none comes while it is paused. It ends waiting
            # ones at once.
            self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        begun = {request.rid: request for request in self._scheduler.waiting_queue if request.output_ids}
        left = {
            name: (list(begun[name].output_ids), list(begun[name].logprob.output_token_logprobs_val))
            for name in names
            if name in begun
        }
        for name in names:
            self._scheduler.abort_request(AbortReq(rid=name))
        return left

    def release(self, tags: list[str]) -> int:
        """Frees the memory of `tags`. Returns the bytes that this rank's device gained."""
        before = self._free_bytes()
        self._scheduler.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        return self._free_bytes() - before

    def restore(self, tags: list[str]) -> None:
        """Gives `tags` memory again."""
        self._scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    def checksums(self) -> dict[str, str]:
        """Returns SGLang's own checksum of each parameter of this rank, by name.

        Raises:
            WeightSyncFailed: this SGLang has no checksums.
        """
        answer = self._scheduler.weight_updater.check_weights(CheckWeightsReqInput(action="checksum"))
        if not answer.success:
            raise WeightSyncFailed(f"this SGLang has no checksums: {answer.message}")
        return dict(answer.payload[self._rank].checksums)

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
