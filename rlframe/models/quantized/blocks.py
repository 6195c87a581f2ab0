"""Weights as a trainer sends them to engines that compute in FP8: which are quantised, and under which names.

They are those of a checkpoint in FP8 blocks on the hub: `name` in float8_e4m3fn, and `name + SCALE` in float32.
Embeddings, the output layer, norms, routers and biases stay as they are. Imports no torch: configurations are checked
without it.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

SIZE = 128
"""Rows and columns of a block."""
SCALE = "_scale_inv"
"""End of the name of a weight's scales."""
MATRICES = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""Ends of the names of weights that are quantised."""
PLAIN = (".mlp.gate.weight", ".shared_expert_gate.weight")
"""Ends of the names of matrices in layers that are not: routers, whose choice is sensitive."""
Shapes = Mapping[str, tuple[int, ...]]


class EngineFormat(StrEnum):
    """Number format of the matrices in an engine's layers."""

    NONE = "none"
    """The number format of its activations."""
    FP8_BLOCK = "fp8_block"
    """float8_e4m3fn, and a float32 scale for each block of 128 x 128."""
    FP8_BLOCK_POWERS_OF_2 = "fp8_block_powers_of_2"
    """The same with scales that are powers of two, as in training with train.fp8.recipe=blockwise."""

    @property
    def channel(self) -> str:
        """End of the name of the trainer's channel for engines of this format."""
        return "" if self is EngineFormat.NONE else f" {self.value}"

    @property
    def powers_of_2(self) -> bool:
        """Returns whether scales are powers of two."""
        return self is EngineFormat.FP8_BLOCK_POWERS_OF_2


def matrices(tensors: Iterable[str]) -> list[str]:
    """Returns the tensors that are quantised."""
    return [name for name in tensors if name.endswith(MATRICES)]


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight of this shape."""
    return tuple(-(-size // SIZE) for size in shape)


def stored(tensors: Shapes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in which `tensors` are sent."""
    quantized = set(matrices(tensors))
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        found[name] = shape
        if name in quantized:
            found[name + SCALE] = scales_shape(shape)
    return found


def statement(tensors: Shapes) -> dict[str, Any]:
    """Returns the quantization_config of a checkpoint of which only `matrices` are quantised."""
    quantized = set(matrices(tensors))
    plain = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and name not in quantized}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIZE, SIZE],
        "modules_to_not_convert": sorted(plain),
    }


def unknown(tensors: Shapes) -> str | None:
    """Returns a matrix of a layer of which it is not known whether engines quantise it, or None."""
    for name, shape in tensors.items():
        layered = ".layers." in name and len(shape) > 1
        if layered and not name.endswith(MATRICES + PLAIN):
            return name
    return None
