"""The part of rlframe that runs inside vLLM's worker processes: the model loader, and a rank's end of weight sync.

vLLM imports this file because the engine names `RankExtension` as its worker extension, which it does before the model
is loaded, so that the loader is registered by then.
"""

import copy
import logging
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rlframe.rollout.served.recording import LoadNotes, checkpoint_tensors, moved, places, random_weights, record_model
from rlframe.rollout.vllm.sampler import install
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import RlframeError, WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.endpoints import WeightDestination
from rlframe.weight_sync.layout.memory import MemoryLayout

logger = logging.getLogger(__name__)

LOAD_FORMAT = "rlframe"
"""What the engine gives as vLLM's `load_format`."""
NOTES = "rlframe_notes"
"""Attribute of the loaded model that holds its `LoadNotes`."""


@register_model_loader(LOAD_FORMAT)
class RecordingLoader(DefaultModelLoader):
    """vLLM's own loader of safetensors, which also notes where everything lands; or random weights, by the same path.

    `model_loader_extra_config` may hold `random_seed`: the weights are then those of `models.random_init`.
    """

    def __init__(self, load_config: Any):
        load_config = copy.copy(load_config)
        settings = dict(load_config.model_loader_extra_config)
        self._random_seed: int | None = settings.pop("random_seed", None)
        load_config.model_loader_extra_config = settings
        load_config.load_format = "safetensors"
        super().__init__(load_config)
        self._tensors: dict[str, tuple[int, ...]] = {}
        self._layout: MemoryLayout | None = None
        self._refusal = ""
        self._record_s = 0.0
        self._places: dict[str, tuple] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """The model, loaded and post-processed by vLLM, with its `LoadNotes`."""
        model = super().load_model(*args, **kwargs)
        if self._layout is not None and (changed := moved(self._places, places(model), engine="vLLM")):
            self._layout, self._refusal = None, changed
        notes = LoadNotes(self._tensors, frozenset(self._places), self._layout, self._refusal, self._record_s)
        setattr(model, NOTES, notes)
        if self._refusal:
            logger.info("weights arrive by reload, because this engine %s", self._refusal)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Record, then load."""
        self._tensors = checkpoint_tensors(Path(model_config.model))
        self._places = places(model)
        started = time.perf_counter()
        self._layout, self._refusal = record_vllm_model(model, self._tensors)
        self._record_s = time.perf_counter() - started
        super().load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors, or random ones; of the latter those that this rank holds part of."""
        if self._random_seed is None:
            yield from super().get_all_weights(model_config, model)
            return
        self.counter_before_loading_weights = time.perf_counter()
        device = str(next(model.parameters()).device)
        held = [name for name in self._tensors if self._layout is None or name in self._layout.boxes]
        yield from random_weights(held, self._tensors, seed=self._random_seed, device=device)


def record_vllm_model(model: Any, tensors: Mapping[str, tuple[int, ...]]) -> tuple[MemoryLayout | None, str]:
    """(layout, "") from the model's own `load_weights`, or (None, why there is none)."""
    parameters = dict(model.named_parameters())
    unmade = next((name for name, value in parameters.items() if value.device.type == "meta"), None)
    if unmade is not None:
        # Its loader counts what arrives and quantises at the end: a recording would be counted.
        return None, f"makes {unmade} while it loads (vLLM quantises the weights as they arrive)"
    with expert_maps_on_cpu(model):
        return record_model(model.load_weights, parameters, tensors)


@contextmanager
def expert_maps_on_cpu(model: Any) -> Iterator[None]:
    """With expert parallelism the loader looks up each expert in a map on the device, and waits for it each time."""
    managers: list[Any] = [getattr(module, "expert_map_manager", None) for module in model.modules()]
    maps = [(manager, manager._expert_map) for manager in managers if getattr(manager, "_expert_map", None) is not None]
    for manager, expert_map in maps:
        manager._expert_map = expert_map.cpu()
    try:
        yield
    finally:
        for manager, expert_map in maps:
            manager._expert_map = expert_map


class LayerwiseReload:
    """vLLM's own path for whole tensors into a running engine: it post-processes them as at the start, layer by layer,
    and writes the result where the layer's parameters are."""

    def __init__(self, model: Any, vllm_config: Any, notes: LoadNotes):
        self._model, self._vllm_config, self._notes = model, vllm_config, notes
        self._arrived: set[str] = set()
        self._filled: set[str] = set()
        self._places: dict[str, tuple] = {}
        self.under_way = False
        """True from `begin` to the end of `finish`: the model cannot run, nor ever will if an error came in between."""

    def begin(self) -> None:
        """After this the model cannot run until `finish`.

        Raises:
            WeightSyncFailed: the last reload was cut short.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.under_way:
            raise WeightSyncFailed("the last reload of vLLM was cut short; the engine has to be started anew")
        self.under_way = True
        self._arrived, self._filled, self._places = set(), set(), places(self._model)
        self._forget_cpu_expert_kernels()
        initialize_layerwise_reload(self._model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Whole tensors by their names in the checkpoint, each once, in any order and any number of calls. vLLM keeps
        references to them until their layer is complete."""
        self._filled |= self._model.load_weights(self._noted(tensors)) or set()

    def finish(self) -> None:
        """Complete the layers.

        Raises:
            WeightSyncFailed: a tensor of the checkpoint did not come, a parameter got nothing, or one was moved, so
                that captured CUDA graphs would go on reading the old one.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self._vllm_config):
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            self._pack_tied_for_cpu()
        if missing := self._notes.tensors.keys() - self._arrived:
            raise WeightSyncFailed(f"the reload of vLLM lacks {len(missing)} tensors, such as {min(missing)}")
        # vLLM 0.26 tells of expert weights without the name of the module that holds them.
        filled, held = (
            {name.replace(".routed_experts.", ".") for name in names}
            for names in (self._filled, self._notes.parameters)
        )
        if empty := held - filled:
            raise WeightSyncFailed(f"the reload of vLLM filled nothing into {len(empty)} parameters, as {min(empty)}")
        if not self._on_cpu and (changed := moved(self._places, places(self._model), engine="vLLM")):
            raise WeightSyncFailed(f"the reload moved parameters that CUDA graphs read: the engine {changed}")
        self.under_way = False

    def _noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._arrived.add(name)
            yield name, tensor

    @property
    def _on_cpu(self) -> bool:
        return self._vllm_config.device_config.device_type == "cpu"

    def _forget_cpu_expert_kernels(self) -> None:
        # vLLM 0.30 to 0.32 pack expert weights for the CPU only where no kernel exists yet, so a reload would leave
        # them unpacked: no error, and logprobs off by several nats.
        if self._on_cpu:
            for module in self._model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None

    def _pack_tied_for_cpu(self) -> None:
        # An output layer that shares the embedding's weight has a packed copy of it on the CPU. vLLM 0.26 to 0.32 make
        # it anew for the layer that got the weight, which is the embedding: no error, and the old output layer.
        if self._on_cpu:
            owners: dict[int, Any] = {}
            for module in self._model.modules():
                for parameter in module.parameters(recurse=False):
                    if parameter.numel() and owners.setdefault(id(parameter), module) is not module:
                        module.quant_method.process_weights_after_loading(module)


class RankExtension:
    """Mixed into vLLM's worker class: its part of `Extension`, which the engine calls on all ranks at once."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def rlframe_start(self) -> None:
        """To be called once, when the model is loaded."""
        install(self.model_runner)
        model = self.model_runner.get_model()
        notes: LoadNotes = getattr(model, NOTES)
        self.rlframe_reload = LayerwiseReload(model, self.vllm_config, notes)
        self.rlframe_destination = WeightDestination(
            notes.layout,
            dict(model.named_parameters()),
            tensors=notes.tensors,
            dtype=self.vllm_config.model_config.dtype,
            device=self.device,
            refusal=notes.refusal,
            reload=self.rlframe_reload,
            record_s=notes.record_s,
        )

    def rlframe_call(self, calls: list[bytes]) -> bytes:
        """See Extension."""
        call: RankCall[DestinationRank, Any] = pickle.loads(calls[self.rank])
        result, failure = None, None
        try:
            result = call.on(self.rlframe_destination)
        except RlframeError as error:
            failure = error
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # The border of the process: vLLM would pass on the text alone, as a bare Exception.
            logger.exception("weight sync: %s failed on rank %d", call, self.rank)
            failure = WeightSyncFailed(f"{call} on rank {self.rank} of vLLM: {error!r}")
        return pickle.dumps((result, failure, self.rlframe_reload.under_way))

    def rlframe_free_bytes(self) -> int:
        """Memory of this rank's device that no process has."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
