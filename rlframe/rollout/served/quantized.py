"""Weights of engines that compute in FP8, quantised while they load as the trainer quantises them for a sync."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized import blocks, stated
from rlframe.models.quantized.blocks import SCALE, EngineFormat
from rlframe.models.quantized.fp8 import Fp8
from rlframe.rollout.served.recording import on_stream
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault


def stated_format(folder: Path, engine_format: EngineFormat) -> dict[str, Any]:
    """Returns what config.json must say besides for a model in `engine_format`, or nothing if that is none.

    Raises:
        ConfigError: it is not known whether engines quantise some matrix of the model.
    """
    if engine_format is EngineFormat.NONE:
        return {}
    family = load_family(folder)
    tensors = family.tensors(family.architecture(read_config(folder)))
    if (name := blocks.unknown(tensors)) is not None:
        said = f"must be none for {folder.name}: rlframe does not know whether engines quantise {name}"
        raise ConfigError([Fault("rollout.quantization", got=engine_format, stated=True, said=said)])
    return {stated.KEY: blocks.statement(tensors)}


def formats(tensors: Iterable[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the number format of each of the tensors of `blocks.stored`.

    Args:
        dtype: of those that are not quantised.
    """
    quantized = set(blocks.matrices(tensors))
    scales = {name + SCALE for name in quantized}
    return {
        name: torch.float8_e4m3fn if name in quantized else torch.float32 if name in scales else dtype
        for name in tensors
    }


def quantized_weights(
    weights: Iterable[tuple[str, Tensor]], engine_format: EngineFormat, *, dtype: torch.dtype, device: str
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in the form that the engine holds, each matrix as its values and its scales.

    Args:
        dtype: number format to which weights are rounded first, in which the engine computes.
        device: device that quantises. Another thread does it, for the reason of `random_weights`.
    """
    stream = torch.cuda.current_stream() if device.startswith("cuda") else None
    with ThreadPoolExecutor(max_workers=1) as pool:
        for name, weight in weights:
            if not name.endswith(blocks.MATRICES):
                yield name, weight
                continue
            make = partial(quantized, weight, engine_format, dtype=dtype, device=device)
            values, scales = pool.submit(on_stream, stream, make).result()
            yield name, values
            yield name + SCALE, scales


def quantized(
    weight: Tensor, engine_format: EngineFormat, *, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Returns (values, scales) of a matrix, computed on `device`."""
    fp8 = Fp8((blocks.SIZE, blocks.SIZE))
    return fp8.quantize(weight.to(device).to(dtype), powers_of_2=engine_format.powers_of_2)


def quantized_reader(tensor: Callable[[str], Tensor], engine_format: EngineFormat) -> Callable[[str], Tensor]:
    """Returns the function that gives a tensor as the engine holds it, from the one that gives those of a
    checkpoint."""

    def held(name: str) -> Tensor:
        if not name.removesuffix(SCALE).endswith(blocks.MATRICES):
            return tensor(name)
        pair = quantized(tensor(name.removesuffix(SCALE)), engine_format, dtype=torch.bfloat16)
        return pair[name.endswith(SCALE)]

    return tensor if engine_format is EngineFormat.NONE else held


def shapes(tensors: Mapping[str, tuple[int, ...]], engine_format: EngineFormat) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that an engine of this format holds."""
    return tensors if engine_format is EngineFormat.NONE else blocks.stored(tensors)
