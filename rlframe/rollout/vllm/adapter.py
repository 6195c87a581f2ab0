"""The policy's adapters in vLLM's memory: one slot, whose layout is recorded from vLLM's own slicing.

vLLM keeps for each wrapped linear module, and for each matrix of the checkpoint that the module fuses, A as
[slots, 1, slot rank, in] and s B as [slots, 1, out, slot rank]. Runs in vLLM's worker.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlframe.models.adapters import key
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.memory import MemoryLayout, record

LORA_ID = 1
"""vLLM's number of the adapter."""
SLOT = 0
"""Index of its slot in the stacked memory."""


def lora_request() -> Any:
    """Returns vLLM's LoRARequest of the policy's adapter. vLLM reads no file, because `occupy` has filled the slot."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", LORA_ID, "weight sync")


def occupy(worker_manager: Any, *, rank: int) -> Any:
    """Gives the slot to the policy for good, with zeros. Returns vLLM's LoRAModelManager, which has the modules.

    Args:
        worker_manager: the WorkerLoRAManager of this rank, without adapters.
    """
    manager = worker_manager._adapter_manager
    with worker_manager.dummy_lora_cache():
        worker_manager.add_dummy_lora(lora_request(), rank=rank)
    manager.activate_adapter(LORA_ID)
    manager.pin_adapter(LORA_ID)
    assert manager.lora_index_to_id[SLOT] == LORA_ID, "the policy has the only slot"
    for module in manager.modules.values():
        module.reset_lora(SLOT)
    _unwrap_vocabulary(manager.model)
    return manager


def _unwrap_vocabulary(model: Any) -> None:
    """Gives the model its own embedding, output layer and logits processor back, which have no adapters here.

    vLLM 0.32's wrapper of the logits processor cannot compute the logits of a prompt's tokens on a CPU, and all of them
    take launches in every step for nothing. The processor cannot read a wrapped embedding, so that a model whose output
    layer is its embedding needs both back.
    """
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, BaseLayerWithLoRA) and not isinstance(module, BaseLinearLayerWithLoRA):
            model.set_submodule(name, module.base_layer)


def adapter_memory(manager: Any) -> dict[str, Tensor]:
    """Returns the stacked A and B of every linear module that vLLM has wrapped, by a name of ours."""
    return {
        f"{name}.{half}.{index}": value
        for name, module in linear_modules(manager).items()
        for half in ("lora_a_stacked", "lora_b_stacked")
        for index, value in enumerate(getattr(module, half))
    }


def linear_modules(manager: Any) -> dict[str, Any]:
    """Returns the wrapped linear modules by name. Embeddings and the output layer have no adapters."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    return {name: module for name, module in manager.modules.items() if isinstance(module, BaseLinearLayerWithLoRA)}


def adapter_layout(manager: Any, memory: Mapping[str, Tensor], adapter: EngineAdapter) -> MemoryLayout:
    """Returns the layout of A and s B in `memory`. What no adapter fills is padding, and zero.

    Raises:
        WeightSyncFailed: vLLM has no place for some tensor, or cuts it in a way that is not a view.
    """
    placed: set[str] = set()

    def load(held: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
        for name, module in linear_modules(manager).items():
            tensors = _matrices(name, manager.packed_modules_mapping)
            names_a, names_b = ([key(tensor, half) for tensor in tensors] for half in ("lora_A", "lora_B"))
            placed.update(each for each in (*names_a, *names_b) if each in checkpoint)
            a, b = _sliced(
                module, [checkpoint.get(each) for each in names_a], [checkpoint.get(each) for each in names_b]
            )
            for index, (part_a, part_b) in enumerate(zip(a, b, strict=True)):
                _fill(held[f"{name}.lora_a_stacked.{index}"], part_a)
                _fill(held[f"{name}.lora_b_stacked.{index}"], part_b)

    layout = record(load, memory, adapter.tensors)
    if missing := sorted(adapter.tensors.keys() - placed):
        raise WeightSyncFailed(
            f"vLLM has no place for {len(missing)} tensors of the adapters, such as {missing[0]}; "
            "set weight_sync.lora=merged"
        )
    return layout


def _matrices(module: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the matrices of the checkpoint that a module of vLLM holds."""
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{each}.weight" for each in packed.get(last) or [last]]


def _sliced(module: Any, a: list[Tensor | None], b: list[Tensor | None]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns this rank's parts of A and B, one for each stacked tensor, as the module's own `set_lora` cuts them."""
    if all(each is None for each in a):
        return [None] * module.n_slices, [None] * module.n_slices
    if module.n_slices == 1:
        (whole_a,), (whole_b,) = a, b
        return [module.slice_lora_a(whole_a)], [module.slice_lora_b(whole_b)]
    return module.slice_lora_a(a), module.slice_lora_b(b)


def _fill(stacked: Tensor, part: Tensor | None) -> None:
    """Copies a part to the begin of the slot, and zeroes the rest."""
    slot = stacked[SLOT, 0]
    rows, cols = part.shape if part is not None else (0, 0)
    if part is not None:
        slot[:rows, :cols].copy_(part)
    slot[rows:].zero_()
    slot[:rows, cols:].zero_()
