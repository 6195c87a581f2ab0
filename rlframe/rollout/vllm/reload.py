"""Weights through vLLM's own loader, for engines whose memory is not as loaded."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from rlframe.rollout.served.recording import LoadNotes, moved, places
from rlframe.rollout.vllm.drafter import PREFIX, Drafter
from rlframe.rollout.vllm.layout import weights
from rlframe.utils.errors import WeightSyncFailed


class LayerwiseReload:
    """Loads whole tensors into a running engine by vLLM's own layerwise reload. It post-processes them as at the start,
    layer by layer, and writes the result into the layer's parameters."""

    def __init__(self, model: Any, vllm_config: Any, notes: LoadNotes, drafter: Drafter | None = None):
        """
        Args:
            notes: of the model and the drafter together.
            drafter: the drafter that is reloaded with the model.
        """
        self._model, self._vllm_config, self._notes, self._drafter = model, vllm_config, notes, drafter
        self._arrived: set[str] = set()
        self._filled: set[str] = set()
        self._places: dict[str, tuple] = {}
        self._forgotten: list[Any] = []
        """Methods of experts that have no kernel until the reload has made one."""
        self.under_way = False
        """True from `begin` to the end of `finish`. The model cannot run meanwhile, and never again if an error came in
        between."""

    def begin(self) -> None:
        """Starts a reload. The model cannot run until `finish`.

        Raises:
            WeightSyncFailed: the last reload was interrupted.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.under_way:
            raise WeightSyncFailed("the last reload of vLLM was interrupted; the engine must be restarted")
        self.under_way = True
        self._arrived, self._filled, self._places = set(), set(), self._places_now()
        self._forget_cpu_expert_kernels()
        # vLLM leaves out modules that it has begun already: those that the drafter shares.
        for model in self._models:
            initialize_layerwise_reload(model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads whole tensors by their names in the checkpoint, each once, in any order and any number of calls. vLLM
        keeps references to them until their layer is complete."""
        if self._drafter is None:
            self._filled |= self._model.load_weights(self._noted(tensors)) or set()
            return
        arrived = list(self._noted(tensors))
        self._filled |= self._model.load_weights(iter(arrived)) or set()
        if own := [(name, tensor) for name, tensor in arrived if name in self._drafter.boxes]:
            self._filled |= {PREFIX + name for name in self._drafter.model.load_weights(iter(own)) or set()}

    def finish(self) -> None:
        """Completes the layers.

        Raises:
            WeightSyncFailed: a tensor of the checkpoint is missing, a parameter was not filled, experts were left out,
                or a parameter was moved, so that captured CUDA graphs would read the old one.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self._vllm_config):
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            if self._drafter is not None:
                config = self._vllm_config.speculative_config.draft_model_config
                finalize_layerwise_reload(self._drafter.model, config)
            self._pack_tied_for_cpu()
        if left := sum(method.moe_kernel is None for method in self._forgotten):
            raise WeightSyncFailed(
                f"the reload of vLLM left out the experts of {left} layers of {type(self._model).__name__}, which vLLM "
                "copies past its own loader: on a CPU this model cannot be trained with rollout.name=vllm"
            )
        if missing := self._notes.tensors.keys() - self._arrived:
            raise WeightSyncFailed(f"the reload of vLLM lacks {len(missing)} tensors, such as {min(missing)}")
        # vLLM 0.26 reports expert weights without the name of the module that holds them.
        filled, held = (
            {name.replace(".routed_experts.", ".") for name in names}
            for names in (self._filled, self._notes.parameters)
        )
        if empty := held - filled:
            raise WeightSyncFailed(f"the reload of vLLM did not fill {len(empty)} parameters, such as {min(empty)}")
        if not self._on_cpu and (changed := moved(self._places, self._places_now(), engine="vLLM")):
            raise WeightSyncFailed(f"the reload of vLLM moved parameters that CUDA graphs read: the engine {changed}")
        self.under_way = False

    @property
    def _models(self) -> list[Any]:
        return [self._model] if self._drafter is None else [self._model, self._drafter.model]

    def _modules(self) -> Iterator[Any]:
        """Yields every module of the models once."""
        yield from {id(module): module for model in self._models for module in model.modules()}.values()

    def _places_now(self) -> dict[str, tuple]:
        """Returns the places of all parameters, those that the drafter shares twice."""
        found = places(weights(self._model))
        if self._drafter is not None:
            found |= {PREFIX + name: place for name, place in places(weights(self._drafter.model)).items()}
        return found

    def _noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._arrived.add(name)
            yield name, tensor

    @property
    def _on_cpu(self) -> bool:
        return self._vllm_config.device_config.device_type == "cpu"

    def _forget_cpu_expert_kernels(self) -> None:
        # Workaround for vLLM 0.30 to 0.32: they pack expert weights for the CPU only if no kernel exists yet, so a
        # reload would leave them unpacked. No error is raised, and logprobs are wrong by several nats. Not needed any
        # more once the calibration of a streamed sync passes without it.
        methods = (getattr(module, "quant_method", None) for module in self._modules()) if self._on_cpu else ()
        self._forgotten = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
        for method in self._forgotten:
            method.moe_kernel = None

    def _pack_tied_for_cpu(self) -> None:
        # Workaround for vLLM 0.26 to 0.32: an output layer that shares the embedding's weight has a packed copy of it
        # on the CPU. A reload repacks only the layer that received the weight, which is the embedding, and leaves the
        # old output layer without an error. Not needed any more once the calibration of a streamed sync of a tied model
        # passes without it.
        if self._on_cpu:
            owners: dict[int, Any] = {}
            for module in self._modules():
                for parameter in module.parameters(recurse=False):
                    if parameter.numel() and owners.setdefault(id(parameter), module) is not module:
                        module.quant_method.process_weights_after_loading(module)
