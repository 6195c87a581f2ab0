"""Low-rank adapters: their settings and their choice of matrices. Imports neither torch nor megatron.

Source: Hu et al. 2021, arXiv 2106.09685: W x + (alpha / rank) B A x, with W frozen, A random and B zero at first.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from rlframe.models.config import HEAD
from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault

ALL_LINEAR = "all-linear"
OUTPUT_LAYER = ("lm_head.weight", "output_layer.weight")
"""The output layer's weight by the names of checkpoints and of Megatron."""


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Settings of low-rank adapters, which are trained instead of the model's own weights."""

    rank: Annotated[int, Range(1, 1 << 16)] = 16
    """Number of columns of B and of rows of A."""
    alpha: Annotated[float, Range(above=0, maximum=10**6)] = 32.0
    """Scale of the adapter: the product B A is multiplied by alpha / rank."""
    rslora: bool = False
    """Whether the factor is alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv 2312.03732)."""
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Fraction of an adapter's inputs that is dropped in training. The policy then differs a little from the one
    engines sample with."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """all-linear (every matrix of a layer but the router), or names of a checkpoint (q_proj, layers.0.mlp.gate_proj,
    lm_head) or of Megatron (linear_qkv, linear_proj, linear_fc1, linear_fc2). A name selects the modules whose full
    name equals it or ends in it after a dot."""
    exclude_modules: list[str] = field(default_factory=list)
    """Modules to exclude from target_modules, by names of the same kinds."""
    experts: bool = True
    """Whether to adapt the matrices of experts too, each expert with an A and a B of its own."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained in full and saved whole with the adapters (lm_head, embed_tokens, norm), by names of the
    same kinds."""
    path: Annotated[str | None, PathText()] = None
    """Folder of an adapter in PEFT format to continue from. null starts new adapters, which change nothing at first."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.target_modules:
            raise SettingError("target_modules", "must name at least one module", got="[]")

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, tensor: str, parameter: str, *, dimensions: int) -> bool:
        """Returns whether the checkpoint's `tensor`, which lies in the Megatron parameter `parameter`, gets an A and a
        B."""
        if not adaptable(tensor, parameter, dimensions=dimensions) or (not self.experts and in_experts(parameter)):
            return False
        everywhere = ALL_LINEAR in self.target_modules and in_layer(parameter)
        return (
            (everywhere or any(names(entry, tensor, parameter) for entry in self.target_modules))
            and not any(names(entry, tensor, parameter) for entry in self.exclude_modules)
            and not self.saves(tensor, parameter)
        )

    def saves(self, tensor: str, parameter: str) -> bool:
        """Returns whether `tensor` is trained in full. A head of values always is, because it starts at zero."""
        return tensor == HEAD or any(names(entry, tensor, parameter) for entry in self.modules_to_save)


def names(entry: str, tensor: str, parameter: str) -> bool:
    """Returns whether `entry` of a setting names the module of `tensor`, by the checkpoint's or Megatron's name."""
    return any(f".{name.rpartition('.')[0]}".endswith(f".{entry}") for name in (tensor, parameter))


def in_layer(parameter: str) -> bool:
    """Returns whether a Megatron parameter belongs to a linear module of a transformer layer, which excludes the output
    layer."""
    return parameter.rpartition(".")[0].rpartition(".")[2].startswith("linear_")


def in_experts(parameter: str) -> bool:
    """Returns whether a Megatron parameter belongs to a routed expert."""
    return ".experts." in parameter


def adaptable(tensor: str, parameter: str, *, dimensions: int) -> bool:
    """Returns whether the parameter can have an adapter: it is the weight of a linear module that the checkpoint stores
    as a matrix."""
    linear = in_layer(parameter) or parameter.endswith("output_layer.weight")
    return linear and parameter.endswith(".weight") and tensor.endswith(".weight") and dimensions == 2


def trained(
    lora: LoraConfig, homes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str | None, tuple[int, ...]]]:
    """Yields all trained tensors: the checkpoint's tensor, lora_A or lora_B or (trained in full) None, and the shape.

    Args:
        homes: the Megatron parameter of every tensor of the checkpoint.
        shapes: shape of every tensor.
    """
    for name, home in homes.items():
        if lora.saves(name, home):
            yield name, None, shapes[name]
        elif lora.adapts(name, home, dimensions=len(shapes[name])):
            yield name, "lora_A", (lora.rank, shapes[name][1])
            yield name, "lora_B", (shapes[name][0], lora.rank)


def faults(
    lora: LoraConfig, homes: Mapping[str, str], dimensions: Mapping[str, int], *, vocabulary_fits: bool
) -> Iterator[Fault]:
    """Yields a fault for every reason why the settings do not fit a model.

    Args:
        homes: the Megatron parameter of every tensor of the checkpoint.
        dimensions: number of dimensions of every tensor.
        vocabulary_fits: whether tensor parallelism divides the vocabulary.
    """
    can = {name for name, home in homes.items() if adaptable(name, home, dimensions=dimensions[name])}
    adapted = {name for name in can if lora.adapts(name, homes[name], dimensions=2)}
    yield from _target_faults(lora, homes, can)
    included, beside = replace(lora, exclude_modules=[]), replace(lora, experts=True)
    for entry in lora.exclude_modules:
        if not any(
            names(entry, name, homes[name]) and included.adapts(name, homes[name], dimensions=2) for name in can
        ):
            yield Fault(
                "train.lora.exclude_modules",
                f"has no effect for {entry!r}",
                why="no linear matrix that would be adapted has this name",
                hint="remove it",
            )
    if not lora.experts and not any(
        in_experts(homes[name]) and beside.adapts(name, homes[name], dimensions=2) for name in can
    ):
        yield Fault(
            "train.lora.experts", "has no effect where no matrix of experts is named", got="false", hint="remove it"
        )
    if lora.experts and ALL_LINEAR in lora.target_modules:
        fused = [name for name, home in homes.items() if in_experts(home) and dimensions[name] > 2]
        if fused:
            yield Fault(
                "train.lora.experts",
                "must be false",
                why=f"the checkpoint keeps experts fused ({fused[0]}), which PEFT's format for matrices "
                "cannot describe",
            )
    everything = replace(lora, exclude_modules=[], modules_to_save=[], experts=True)
    if not adapted and any(everything.adapts(name, homes[name], dimensions=2) for name in can):
        yield Fault(
            "train.lora.exclude_modules",
            "must leave a matrix to adapt, together with modules_to_save and experts",
            hint="remove some of their names, or set experts to true",
        )
    if not vocabulary_fits and any(homes[name].endswith("output_layer.weight") for name in adapted):
        yield Fault(
            "train.lora.target_modules",
            "names the output layer, but tensor parallelism does not divide the vocabulary",
            why="remove it, or choose another t in train.parallel",
        )
    yield from _saved_faults(lora, homes)


def _target_faults(lora: LoraConfig, homes: Mapping[str, str], can: set[str]) -> Iterator[Fault]:
    for entry in lora.target_modules:
        meant = [name for name, home in homes.items() if names(entry, name, home)]
        if entry == ALL_LINEAR or can & set(meant):
            continue
        if meant:
            yield Fault(
                "train.lora.target_modules",
                said=f"{entry!r} ({meant[0]}) is no linear matrix and cannot be adapted; name it in "
                "modules_to_save to train it in full",
            )
        else:
            yield Fault(
                "train.lora.target_modules",
                said=f"{entry!r} must name modules of the model by their full name or its end, such as "
                f"q_proj or linear_fc1; {_tied(entry, homes) or 'no module has this name'}",
            )


def _tied(entry: str, homes: Mapping[str, str]) -> str:
    """Returns why a name of the output layer names nothing in a model that has none of its own, or an empty text."""
    if not names(entry, *OUTPUT_LAYER) or OUTPUT_LAYER[1] in homes.values():
        return ""
    return (
        "the output layer of this model is its embedding (tie_word_embeddings), which is trained in full where "
        "modules_to_save has embed_tokens"
    )


def _saved_faults(lora: LoraConfig, homes: Mapping[str, str]) -> Iterator[Fault]:
    """Yields a fault for each parameter of Megatron's that would be trained only in part."""
    saved = {name for name, home in homes.items() if lora.saves(name, home)}
    for entry in lora.modules_to_save:
        if not any(names(entry, name, homes[name]) for name in saved):
            yield Fault(
                "train.lora.modules_to_save",
                said=f"{entry!r} must name modules of the model; {_tied(entry, homes) or 'no module has this name'}",
            )
    shared = {homes[name] for name in saved}
    left = [name for name, home in homes.items() if home in shared and name not in saved]
    if left:
        yield Fault(
            "train.lora.modules_to_save",
            "must name all modules that Megatron stores in one parameter",
            why=f"{left[0]} lies in {homes[left[0]]} with "
            f"{next(n for n in sorted(saved) if homes[n] == homes[left[0]])}",
            hint="name both",
        )
