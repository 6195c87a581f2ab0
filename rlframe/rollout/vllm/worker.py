"""The code that runs inside vLLM's worker processes: the model loader, and a rank's end of weight sync.

vLLM imports this file because the engine names `RankExtension` as its worker extension. That happens before the model
is loaded, so the loader is registered in time.
"""

import copy
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.base.routes import Routers
from rlframe.rollout.base.speculative import Drafts
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
from rlframe.rollout.vllm import drafter
from rlframe.rollout.vllm.adapter import adapter_layout, adapter_memory, occupy
from rlframe.rollout.vllm.decode.ahead import look_ahead, multiplies_few_rows
from rlframe.rollout.vllm.decode.runner import prefer_second
from rlframe.rollout.vllm.drafter import DRAFT, DRAFT_NOTES, DraftNotes
from rlframe.rollout.vllm.layout import weights
from rlframe.rollout.vllm.line import CALL, TAKE, answering, wanted_in
from rlframe.rollout.vllm.reload import LayerwiseReload
from rlframe.rollout.vllm.routes import CAPTURE, RouteCapture, RouteRecord
from rlframe.rollout.vllm.sampling import verify
from rlframe.rollout.vllm.sampling.sampler import install
from rlframe.rollout.vllm.warm_up import warm_up_with
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import RlframeError, WeightSyncFailed
from rlframe.weight_sync.adapted import AdaptedDestination
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.endpoints import WeightDestination
from rlframe.weight_sync.layout.memory import MemoryLayout

# vLLM's core and its workers import this module before they ask for their runner and count the steps under way.
prefer_second()
look_ahead()
logger = logging.getLogger(__name__)

LOAD_FORMAT = "rlframe"
"""Value of vLLM's `load_format` that selects `RecordingLoader`."""
MEASURED = (9, 0)
"""Compute capability of the GPUs, of Hopper, whose decode steps share tokens unless told otherwise, and from which on
kernels can begin before the one ahead has ended."""
NOTES = "rlframe_notes"
"""Attribute of the loaded model that holds its `LoadNotes`."""


@register_model_loader(LOAD_FORMAT)
class RecordingLoader(DefaultModelLoader):
    """Loads safetensors with vLLM's own loader and records where every tensor lands; loads random weights, and what
    quantised ones stand for, on the same path.

    `model_loader_extra_config` may hold `random_seed`: the weights are then those of `models.random_init`;
    `share_prompts`, for the function of that name, or None, see `shares`; `warm_up`, for `warm_up_with`; `routes`, for
    a `RouteCapture`; `mtp`, if vLLM drafts with the head for multi-token prediction: whether weight sync brings it;
    `as_loaded`, for `keep_as_loaded`; and `engine_format`, in which matrices are held.
    """

    def __init__(self, load_config: Any):
        load_config = copy.copy(load_config)
        settings = dict(load_config.model_loader_extra_config)
        if shares(settings.pop("share_prompts", False)):
            share_prompts()
        self._random_seed: int | None = settings.pop("random_seed", None)
        self._warm_up: dict[str, Any] | None = settings.pop("warm_up", None)
        self._with_routes: bool = settings.pop("routes", False)
        self._with_mtp: bool | None = settings.pop("mtp", None)
        self._drafts = False
        """Whether the model is the drafter."""
        self._format = EngineFormat(settings.pop("engine_format", EngineFormat.NONE))
        self._as_loaded: bool = settings.pop("as_loaded", False)
        if self._as_loaded:
            keep_as_loaded()
        load_config.model_loader_extra_config = settings
        load_config.load_format = "safetensors"
        super().__init__(load_config)
        self._tensors: dict[str, tuple[int, ...]] = {}
        self._layout: MemoryLayout | None = None
        self._refusal = ""
        self._record_s = 0.0
        self._formats: dict[str, torch.dtype] = {}
        self._places: dict[str, tuple] = {}

    def load_model(self, vllm_config: Any, model_config: Any, **kwargs: Any) -> Any:
        """Returns the model, loaded and post-processed by vLLM, with its `LoadNotes` or `DraftNotes`. A draft
        model of its own is loaded by vLLM alone."""
        asked = multiplies_few_rows(vllm_config) and vllm_config.device_config.device_type == "cuda"
        own_kernels = asked and torch.cuda.get_device_capability() >= MEASURED
        if own_kernels:
            # They need Triton, which an engine on a CPU may lack.
            from rlframe.rollout.vllm.decode import few_rows, joined, rotary

            few_rows.install()
        self._drafts = model_config.runner_type == DRAFT
        if self._drafts and self._with_mtp is None:
            return DefaultModelLoader(self.load_config).load_model(
                vllm_config=vllm_config, model_config=model_config, **kwargs
            )
        model = super().load_model(vllm_config=vllm_config, model_config=model_config, **kwargs)
        if own_kernels:
            rotary.install(model)
            joined.install(model, vllm_config)
        recorded = self._layout
        if self._layout is not None and (changed := moved(self._places, places(weights(model)), engine="vLLM")):
            self._layout, self._refusal = None, changed
        if self._drafts:
            if self._with_mtp:
                setattr(model, DRAFT_NOTES, DraftNotes(self._tensors, recorded, self._refusal, self._record_s))
            return model
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
        if self._with_routes:
            setattr(model, CAPTURE, capture_of(model, vllm_config))
        if self._warm_up is not None:
            # Before vLLM warms up, which it does after it has loaded the model.
            warm_up_with(self._warm_up)
        if self._refusal:
            logger.info("weights arrive by reload, because this engine %s", self._refusal)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Records the layout, then loads the weights."""
        tensors = checkpoint_tensors(Path(model_config.model), with_mtp=self._drafts)
        self._tensors = dict(shapes(tensors, self._format))
        self._places = places(weights(model))
        started = time.perf_counter()
        dtypes = formats(self._tensors, model_config.dtype) if self._format is not EngineFormat.NONE else None
        self._layout, self._refusal = record_vllm_model(model, self._tensors, dtypes, drafts=self._drafts)
        self._record_s = time.perf_counter() - started
        self._formats = formats_of(self._layout, weights(model), self._tensors)
        if self._as_loaded:
            keep_blocks_as_loaded(model)
        super().load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the checkpoint's tensors, or random ones, as this engine holds them."""
        self.counter_before_loading_weights = time.perf_counter()
        first = FirstWeights(
            folder=Path(model_config.model),
            random_seed=self._random_seed,
            engine_format=self._format,
            dtype=model_config.dtype,
            layout=self._layout,
        )
        own = partial(super().get_all_weights, model_config, model)
        yield from first.read(own, device=str(next(model.parameters()).device))


def capture_of(model: Any, vllm_config: Any) -> RouteCapture | None:
    """Returns what notes the experts that `model` chooses. None if another rank, which chooses the same, does."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank():
        return None
    folder = Path(vllm_config.model_config.model)
    return RouteCapture(
        model,
        Routers.of(load_family(folder).architecture(read_config(folder))),
        num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def shares(asked: bool | None) -> bool:
    """Returns whether decode steps read shared tokens once. None stands for the GPUs for which its kernels are tuned:
    others have less memory of a multiprocessor, or were not measured."""
    return torch.cuda.get_device_capability() == MEASURED if asked is None else asked


def share_prompts() -> None:
    """Lets decode steps read the tokens that sequences share once, wherever vLLM chooses FlashAttention. Its layers ask
    for their kernels when the model is made, after the loader."""
    # Its kernels need Triton, which an engine on a CPU may lack.
    from rlframe.rollout.vllm.attention.backend import register

    register()


def keep_as_loaded() -> None:
    """Makes linear layers of a CPU keep their weights as loaded, so that their memory can be proved. They are then
    torch's products, without vLLM's packed copies."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    assert hasattr(_custom_ops, "_supports_onednn") and hasattr(utils, "check_cpu_sgl_kernel"), "vLLM 0.26 to 0.32"
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def keep_blocks_as_loaded(model: Any) -> None:
    """Makes layers in FP8 blocks of a CPU keep their weights as loaded, for the reason of `keep_as_loaded`. Their
    kernel then packs a weight each time that it reads it (vLLM 0.32, `CPUFp8BlockScaledMMKernel`)."""
    layers: list[Any] = [each for each in model.modules() if getattr(each, "weight_block_size", None) is not None]
    if not layers:
        return
    for layer in layers:
        layer._cpu_skip_gemm_dispatch = True
    from vllm.v1.attention.backends import cpu_attn

    # Workaround for vLLM 0.32: attention by AMX leaves the tiles of a thread otherwise than the product in FP8 expects
    # to find them, which then dies of an illegal instruction, sooner or later. Not needed any more once scores of 3, 17
    # and 40 tokens pass without it.
    chosen = cpu_attn._get_attn_isa
    cpu_attn._get_attn_isa = lambda *args, **kwargs: "vec" if (isa := chosen(*args, **kwargs)) == "amx" else isa


def record_vllm_model(
    model: Any,
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    drafts: bool = False,
) -> tuple[MemoryLayout | None, str]:
    """Returns (layout, "") from the model's own `load_weights`, or (None, why there is none).

    Args:
        dtypes: as of `record_loader`.
        drafts: whether it is a drafter, which may leave what it shares with the policy unfilled.
    """
    parameters = weights(model)
    unmade = next((name for name, value in parameters.items() if value.device.type == "meta"), None)
    if unmade is not None:
        # The loader of such a layer counts the tensors and quantises at the end; a recording would be counted too.
        return None, f"makes {unmade} while it loads (vLLM quantises the weights as they arrive)"
    with expert_maps_on_cpu(model):
        return record_model(model.load_weights, parameters, tensors, dtypes, sparse=drafts)


@contextmanager
def expert_maps_on_cpu(model: Any) -> Iterator[None]:
    """Moves expert maps to the CPU for the time of loading. With expert parallelism the loader looks up each expert in
    a map on the device, and waits for it each time."""
    managers: list[Any] = [getattr(module, "expert_map_manager", None) for module in model.modules()]
    maps = [(manager, manager._expert_map) for manager in managers if getattr(manager, "_expert_map", None) is not None]
    for manager, expert_map in maps:
        manager._expert_map = expert_map.cpu()
    try:
        yield
    finally:
        for manager, expert_map in maps:
            manager._expert_map = expert_map


class RankExtension:
    """Adds the methods of `Extension` to vLLM's worker class. The engine calls them on all ranks at once."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def rlframe_start(self, adapter: bytes, with_mtp: bool) -> None:
        """See Extension."""
        model = self.model_runner.get_model()
        capture: RouteCapture | None = getattr(model, CAPTURE, None)
        self.rlframe_routes = RouteRecord(capture, self.model_runner) if capture is not None else None
        self.rlframe_record = install(self.model_runner, routes=self.rlframe_routes)
        if self.device.type == "cuda":
            # It needs Triton, which an engine on a CPU may lack.
            from rlframe.rollout.vllm.decode import steady
            from rlframe.rollout.vllm.sampling import one_pass

            one_pass.install(self.model_runner)
            steady.install(self.model_runner)
        self.rlframe_checker = verify.install(self.model_runner)
        notes: LoadNotes = getattr(model, NOTES)
        self.rlframe_drafter = drafter.of_runner(self.model_runner, model)
        assert (self.rlframe_drafter is not None) == with_mtp, "vLLM 0.26 to 0.32 load the head by the loader above"
        if self.rlframe_drafter is not None:
            notes = self.rlframe_drafter.joined(notes)
        self.rlframe_reload = LayerwiseReload(model, self.vllm_config, notes, self.rlframe_drafter)
        # Modules that vLLM has wrapped for adapters hold what they were as `base_layer`.
        parameters = {name.replace(".base_layer.", "."): value for name, value in weights(model).items()}
        self.rlframe_destination = WeightDestination(
            notes.layout,
            drafter.parameters_with(self.rlframe_drafter, parameters),
            tensors=notes.tensors,
            dtype=self.vllm_config.model_config.dtype,
            device=self.device,
            formats=notes.formats,
            refusal=notes.refusal,
            # vLLM's own loader has not been tried with values and scales that come apart.
            reload=None if notes.quantized else self.rlframe_reload,
            record_s=notes.record_s,
        )
        if (asked := pickle.loads(adapter)) is not None:
            self.rlframe_destination = self._adapted(self.rlframe_destination, asked)

    def _adapted(self, base: WeightDestination, adapter: EngineAdapter) -> AdaptedDestination:
        """Gives vLLM's only adapter slot to the policy, and returns the end for both."""
        manager = occupy(self.model_runner.lora_manager, rank=adapter.rank)
        memory, started = adapter_memory(manager), time.perf_counter()
        layout, refusal = None, ""
        try:
            layout = adapter_layout(manager, memory, adapter)
        except WeightSyncFailed as error:
            refusal = f"cannot hold the adapters: {error}"
        return AdaptedDestination(
            base,
            layout=layout,
            parameters=memory,
            tensors=adapter.tensors,
            dtype=self.vllm_config.model_config.dtype,
            device=self.device,
            refusal=refusal,
            record_s=time.perf_counter() - started,
        )

    def rlframe_call(self, calls: list[bytes]) -> bytes:
        """See Extension."""
        return self._execute(calls[self.rank])

    def _execute(self, pickled: bytes) -> bytes:
        """Executes a call of this rank's WeightDestination; see `Extension.rlframe_call`."""
        call: RankCall[DestinationRank, Any] = pickle.loads(pickled)
        result, failure = None, None
        try:
            result = call.on(self.rlframe_destination)
        except RlframeError as error:
            failure = error
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # The border of the process: vLLM would pass on only the text, as a plain Exception.
            logger.exception("weight sync: %s failed on vLLM rank %d", call, self.rank)
            failure = WeightSyncFailed(f"{call} on rank {self.rank} of vLLM: {error!r}")
        return pickle.dumps((result, failure, self.rlframe_reload.under_way))

    def rlframe_take(self, wanted: list[tuple[str, int, int]]) -> bytes:
        """See Extension."""
        record, routes = self.rlframe_record, self.rlframe_routes
        rank_of_engine = self.rank % self.vllm_config.parallel_config.tensor_parallel_size
        if record is None or (self._samples_all() and rank_of_engine):
            return pickle.dumps([])
        found = (
            (*record.take(key, count), None if routes is None else routes.take(key, num_rows))
            for key, count, num_rows in wanted
        )
        return pickle.dumps(list(found))

    def rlframe_line(self) -> bytes:
        """See Extension. Experts lie where steps write: they are read between two of them, by vLLM's own call."""
        answers: dict[bytes, Callable[[bytes], bytes]] = {CALL: self._received_beside}
        records = self.rlframe_record is not None and self.rlframe_routes is None
        takes = records and self._samples_all() and not self.rank
        if takes:
            answers[TAKE] = lambda message: self.rlframe_take(wanted_in(message))
        return pickle.dumps((answering(answers, self.device), takes))

    def _received_beside(self, call: bytes) -> bytes:
        """Executes a call to receive weights. Returns nothing if it must be made by vLLM."""
        return self._execute(call) if self.rlframe_destination.pulls_alone else b""

    def _samples_all(self) -> bool:
        """Returns whether this rank samples the whole batch, as the others. Otherwise each samples a part (an option of
        vLLM 0.32)."""
        return not getattr(self.vllm_config.parallel_config, "enable_batch_sharded_sampling", False)

    def rlframe_drafts(self) -> bytes:
        """See Extension."""
        return pickle.dumps(Drafts() if self.rlframe_checker is None else self.rlframe_checker.drafts())

    def rlframe_refill(self) -> None:
        """See Extension."""
        if self.rlframe_drafter is not None:
            self.rlframe_drafter.refill()

    def rlframe_free_bytes(self) -> int:
        """Returns the bytes of this rank's device that no process uses."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
