"""What an engine's worker notes while it loads its model: where every tensor of the checkpoint lands."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframe.models.hub import load_family, read_config
from rlframe.models.random_init import random_tensor
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.memory import MemoryLayout, record_loader


@dataclass(frozen=True, slots=True)
class LoadNotes:
    """What was learned while the model was loaded."""

    tensors: dict[str, tuple[int, ...]]
    """Shape of every tensor of the checkpoint."""
    parameters: frozenset[str]
    """Names of the parameters as the engine creates them, before it repacks any."""
    layout: MemoryLayout | None
    """Where the tensors lie in this rank's parameters; None where that cannot be told."""
    refusal: str
    """Why there is no layout, a clause whose subject is the engine; empty when there is one."""
    record_s: float
    """Seconds that recording took."""


def checkpoint_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of the model in `folder` has."""
    family = load_family(folder)
    return family.tensors(family.architecture(read_config(folder)))


def places(model: Any) -> dict[str, tuple]:
    """By parameter: where and how it lies in memory."""
    return {
        name: (
            value.untyped_storage().data_ptr(),
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            value.dtype,
        )
        for name, value in model.named_parameters()
    }


def moved(before: Mapping[str, tuple], after: Mapping[str, tuple], *, engine: str) -> str:
    """Why a recording does not hold after post-processing, as a clause of the engine; empty when it does.

    Args:
        engine: what it is called.
    """
    changed = [name for name, place in before.items() if after.get(name) != place]
    changed += [name for name in after if name not in before]
    if not changed:
        return ""
    name = changed[0]
    more = f", and {len(changed) - 1} more parameters likewise" if len(changed) > 1 else ""
    old, new = (
        f"{list(where[name][2])} of {str(where[name][4]).removeprefix('torch.')}" if name in where else "absent"
        for where in (before, after)
    )
    return f"keeps {name} repacked by {engine} (as loaded: {old}; as used: {new}{more})"


def record_model(
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, tuple[int, ...]],
) -> tuple[MemoryLayout | None, str]:
    """(layout, "") from the model's own loader, or (None, why there is none, as a clause of the engine).

    Args: as of `record_loader`.
    """
    try:
        return record_loader(load, parameters, tensors), ""
    except WeightSyncFailed as error:
        return None, f"has a loader that cannot be recorded: {error}"
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        # What engines' loaders raise over tensors that they expect in another form, as for quantised checkpoints.
        return None, f"has a loader that does not take the tensors of an unquantised checkpoint: {error!r}"


def random_weights(
    names: Iterable[str], tensors: Mapping[str, tuple[int, ...]], *, seed: int, device: str
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `models.random_init` one by one, drawn in another thread.

    Engines load inside the memory pool of their sleep mode, which keeps what is freed there (torch 2.11): the numbers
    of a large model would not fit. A pool serves the thread that opened it, so another one draws them; on the stream of
    this one, which reads them without waiting for any other (vLLM has its own when tp is above 1).
    """
    stream = torch.cuda.current_stream() if device.startswith("cuda") else None
    with ThreadPoolExecutor(max_workers=1) as pool:
        for name in names:
            draw = partial(random_tensor, name, tensors[name], seed=seed, device=device)
            yield name, pool.submit(_on_stream, stream, draw).result()


def _on_stream(stream: Any, draw: Callable[[], Tensor]) -> Tensor:
    """What `draw` returns, with its work in order with the other work of `stream`; None on CPU."""
    with torch.cuda.stream(stream):
        return draw()
