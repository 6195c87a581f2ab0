"""Recording of where every tensor of the checkpoint lands while an engine's worker loads its model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlframe.models.hub import load_family, read_config
from rlframe.models.random_init import random_tensor
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.memory import MemoryLayout, record_loader

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadNotes:
    """Results of recording the load of a model."""

    tensors: dict[str, tuple[int, ...]]
    """Shape of every tensor of the checkpoint."""
    parameters: frozenset[str]
    """Names of the parameters as the engine creates them, before it repacks any."""
    layout: MemoryLayout | None
    """Layout of the tensors in this rank's parameters. None if it could not be recorded."""
    refusal: str
    """Reason why there is no layout, as a clause whose subject is the engine. Empty if there is a layout."""
    record_s: float
    """Seconds that recording took."""
    formats: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Number formats in which the engine creates tensors of the checkpoint, as far as they are known."""
    quantized: bool = False
    """Whether the engine holds matrices in an EngineFormat of few bits."""


def checkpoint_tensors(folder: Path, *, with_mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint of the model in `folder` has.

    Args:
        with_mtp: the tensors of the head for multi-token prediction too.
    """
    family = load_family(folder)
    return family.tensors(family.architecture(read_config(folder)).keeping_mtp(with_mtp))


def places(parameters: Mapping[str, Tensor]) -> dict[str, tuple]:
    """Returns address, strides and format of every parameter, by name."""
    return {
        name: (
            value.untyped_storage().data_ptr(),
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            value.dtype,
        )
        for name, value in parameters.items()
    }


def formats_of(
    layout: MemoryLayout | None, parameters: Mapping[str, Tensor], tensors: Iterable[str]
) -> dict[str, torch.dtype]:
    """Returns the number formats of the tensors in the engine as it is created: of those in its recorded layout, or
    without one of those whose parameters have their names."""
    if layout is not None:
        return {name: layout.dtype(name) for name in layout.boxes}
    return {name: parameters[name].dtype for name in tensors if name in parameters}


def moved(before: Mapping[str, tuple], after: Mapping[str, tuple], *, engine: str) -> str:
    """Returns why a recording does not hold after post-processing, as a clause whose subject is the engine. Returns an
    empty string if it holds.

    Args:
        engine: name of the engine.
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
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    sparse: bool = False,
) -> tuple[MemoryLayout | None, str]:
    """Returns (layout, "") from the model's own loader, or (None, reason) with the reason as a clause whose subject is
    the engine.

    Args: as of `record_loader`.
    """
    try:
        return record_loader(load, parameters, tensors, dtypes, sparse=sparse), ""
    except WeightSyncFailed as error:
        return None, f"has a loader that cannot be recorded: {error}"
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        # Engines' loaders raise these for tensors they expect in another form, as for quantised checkpoints.
        return None, f"has a loader that does not take the tensors of an unquantised checkpoint: {error!r}"


def random_weights(names: Iterable[str], folder: Path, *, seed: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of `models.random_init` for the model in `folder` one by one, drawn in another thread.

    Engines load inside the memory pool of their sleep mode, which keeps freed memory (torch 2.11): the random numbers
    of a large model would not fit. A pool serves the thread that opened it, so another thread draws them. It uses this
    thread's stream, whose later work then needs no synchronization (vLLM has a stream of its own if tp is above 1).
    """
    stream = torch.cuda.current_stream() if device.startswith("cuda") else None
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    tensors, centered = family.tensors(architecture), architecture.zero_centered_norms
    with ThreadPoolExecutor(max_workers=1) as pool:
        for name in names:
            draw = partial(random_tensor, name, tensors[name], zero_centered_norms=centered, seed=seed, device=device)
            yield name, pool.submit(on_stream, stream, draw).result()


def on_stream(stream: Any, make: Callable[[], T]) -> T:
    """Returns what `make` returns, with its work ordered on `stream`, which is None on a CPU."""
    with torch.cuda.stream(stream):
        return make()
