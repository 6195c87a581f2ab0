"""Numbers of parameters of a rank, from the family's own shapes."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import torch

from rlframe.megatron.config.lora import ALL_LINEAR, LoraConfig, in_experts
from rlframe.megatron.config.mtp import in_head
from rlframe.megatron.config.optimizer import is_by_muon
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.muon.newton_schulz import operations
from rlframe.models.families.base import Architecture, Family, Shard
from rlframe.models.shards import padded_vocab_size
from rlframe.models.stages import chunk_layers
from rlframe.weight_sync.layout.boxes import Box
from rlframe.weight_sync.layout.memory import MemoryLayout, record

MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "linear_proj": ("o_proj",),
    "linear_in": ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "linear_out": ("out_proj",),
    "linear_fc1": ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj"),
    "linear_fc2": ("down_proj", "w2"),
}
"""Megatron's names of modules for train.lora.target_modules, and those of checkpoints."""
INDEXER = ".indexer."
"""Part of the names of weights that are held and never trained."""
EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name of the embedding."""
LAYER = re.compile(r"\.layers\.\d+\.")
"""Part of a tensor's name that says its layer."""
NOT_ADAPTED = ("mlp.gate", "router", "block_sparse_moe.gate", "shared_expert_gate", "norm")
"""Ends of modules of a layer that have no adapter: routers and norms."""


class LayerKind(NamedTuple):
    """The kind of a layer. Layers of one kind have the same sizes."""

    sparse: bool
    """Whether it has experts."""
    gated_delta: bool = False
    """Whether it has a gated delta net."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWeights:
    """Numbers of parameters of one rank of a pipeline stage."""

    stage: int
    chunks: tuple[tuple[int, ...], ...]
    """Global indices of the layers of each of its chunks."""
    dense: int
    """Parameters of attention, norms, routers, dense MLPs, embedding and output layer."""
    experts: int
    head: int
    """Parameters of `dense` that give the logits: the output layer, or the embedding tied to it. 0 on other stages."""
    trained_dense: int
    trained_experts: int
    adapted: int = 0
    """Parameters of the weights that have adapters, which may be held a second time, merged."""
    saved: int = 0
    """Parameters that are trained in full beside adapters."""
    trains_head: bool = True
    """Whether the parameters of `head` are trained in full."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Global indices of its layers."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @property
    def all(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedBesideBase:
    """Numbers of parameters of a rank with adapters; see StageWeights."""

    dense: int = 0
    experts: int = 0
    adapted: int = 0
    saved: int = 0
    head: bool = False

    def plus(self, name: str, count: int, *, adapted: int = 0, saved: int = 0, head: bool = False) -> Self:
        """Returns the numbers with `count` trained parameters more, those of the weight `name`."""
        experts = in_experts(name)
        return replace(
            self,
            dense=self.dense + (0 if experts else count),
            experts=self.experts + (count if experts else 0),
            adapted=self.adapted + adapted,
            saved=self.saved + saved,
            head=self.head or head,
        )


class Counter:
    """Counts the parameters of a model in any layout. Each kind of layer is measured once for each split."""

    def __init__(self, family: Family, architecture: Architecture, *, frozen_mtp: bool = False):
        """
        Args:
            frozen_mtp: whether the head for multi-token prediction, if the architecture has it, is not trained.
        """
        self.family, self.architecture, self.frozen_mtp = family, architecture, frozen_mtp
        self._parts: dict[tuple[int, int, int, str | LayerKind], tuple[int, int, int]] = {}
        self._with_adapters: dict[tuple[int, int, int, str | LayerKind, int, str], TrainedBesideBase] = {}
        self._widths: dict[tuple[str, LayerKind], tuple[float, float]] = {}
        self._tensors: dict[str, tuple[int, ...]] | None = None

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor of the checkpoint."""
        if self._tensors is None:
            self._tensors = self.family.tensors(self.architecture)
        return self._tensors

    def stages(self, parallel: Parallel, lora: LoraConfig | None = None) -> list[StageWeights]:
        """Returns the weights of a rank of each pipeline stage; all ranks of a stage hold equally many."""
        counts = chunk_layers(self.architecture.num_layers, **parallel.stages)
        found = []
        for stage in range(parallel.pp):
            chunks = tuple(
                tuple(range(sum(counts[:chunk]), sum(counts[: chunk + 1])))
                for chunk in range(stage, len(counts), parallel.pp)
            )
            found.append(self._stage(parallel, lora, stage, chunks))
        return found

    def _stage(
        self, parallel: Parallel, lora: LoraConfig | None, stage: int, chunks: tuple[tuple[int, ...], ...]
    ) -> StageWeights:
        first, last = stage == 0, stage == parallel.pp - 1
        layers = tuple(layer for chunk in chunks for layer in chunk)
        parts = [self._layer(parallel, layer) for layer in layers]
        ends = {(True, True): "both ends", (True, False): "embedding", (False, True): "output"}
        if end := ends.get((first, last)):
            parts.append(self._part(parallel, end))
        dense, experts, frozen = (sum(values) for values in zip(*parts, strict=True)) if parts else (0, 0, 0)
        rows = padded_vocab_size(self.architecture, tp=parallel.tp) // parallel.tp * self.architecture.hidden_size
        head = rows if last and self.architecture.num_outputs is None else 0
        if lora is None:
            still = self._head(parallel) if last and self.frozen_mtp else (0, 0)
            return StageWeights(
                stage=stage, chunks=chunks, dense=dense, experts=experts, head=head,
                trained_dense=dense - frozen - still[0], trained_experts=experts - still[1],
            )  # fmt: skip
        own = [self._trained(parallel, lora, kind_of(self.architecture, layer), layer) for layer in layers]
        own += [self._trained(parallel, lora, end)] if end else []
        return StageWeights(
            stage=stage, chunks=chunks, dense=dense, experts=experts, head=head,
            trained_dense=sum(each.dense for each in own), trained_experts=sum(each.experts for each in own),
            adapted=sum(each.adapted for each in own), saved=sum(each.saved for each in own),
            trains_head=any(each.head for each in own),
        )  # fmt: skip

    def _layer(self, parallel: Parallel, layer: int) -> tuple[int, int, int]:
        return self._part(parallel, kind_of(self.architecture, layer), layer)

    def _part(self, parallel: Parallel, kind: str | LayerKind, layer: int = 0) -> tuple[int, int, int]:
        """Returns the dense and the expert parameters of one layer, or of what is before or after all layers, and those
        of the dense ones that are never trained."""
        key = (parallel.tp, parallel.ep, parallel.etp, kind)
        if key not in self._parts:
            shapes = self._shapes(parallel, layer, kind)
            sizes = {name: math.prod(shape) for name, shape in shapes.items()}
            experts = sum(size for name, size in sizes.items() if ".experts." in name)
            frozen = sum(size for name, size in sizes.items() if INDEXER in name)
            self._parts[key] = (sum(sizes.values()) - experts, experts, frozen)
        return self._parts[key]

    def _head(self, parallel: Parallel) -> tuple[int, int]:
        """Returns the trainable dense and expert parameters of the head for multi-token prediction."""
        dense = experts = 0
        for name, shape in self._shapes(parallel, 0, "output").items():
            if in_head(name) and INDEXER not in name:
                size = math.prod(shape)
                experts, dense = (experts + size, dense) if ".experts." in name else (experts, dense + size)
        return dense, experts

    def _shapes(self, parallel: Parallel, layer: int, kind: str | LayerKind = "layer") -> Mapping[str, tuple[int, ...]]:
        return self.family.parameters(self.architecture, self._shard(parallel, layer, kind))

    def _shard(self, parallel: Parallel, layer: int, kind: str | LayerKind) -> Shard:
        return Shard(
            tp_size=parallel.tp,
            ep_size=parallel.ep,
            etp_size=parallel.etp,
            first_layer=layer,
            num_layers=0 if kind in ("embedding", "output", "both ends") else 1,
            has_embedding=kind in ("embedding", "both ends"),
            has_output=kind in ("output", "both ends"),
            padded_vocab_size=padded_vocab_size(self.architecture, tp=parallel.tp),
        )

    def matrices(self, parallel: Parallel, layers: Sequence[int]) -> tuple[int, int]:
        """Returns the dense and the expert parameters of a rank that Muon updates."""
        dense = experts = 0
        for layer in layers:
            for name, shape in self._shapes(parallel, layer).items():
                if is_by_muon(name):
                    size = math.prod(shape)
                    experts, dense = (experts + size, dense) if ".experts." in name else (experts, dense + size)
        return dense, experts

    def orthogonalization(self, layers: Sequence[int], *, steps: int) -> float:
        """Returns the floating-point operations with which Muon orthogonalises the matrices of some layers, of all
        ranks together."""
        found = 0.0
        for layer in layers:
            for name, shape in self.tensors.items():
                if f".layers.{layer}." in name and len(shape) > 1 and not is_other(name):
                    found += math.prod(shape[:-2]) * operations(*shape[-2:], steps=steps)
        return found

    def _trained(
        self, parallel: Parallel, lora: LoraConfig, kind: str | LayerKind, layer: int = 0
    ) -> TrainedBesideBase:
        """Returns what is trained of one layer, or of what is before or after all layers, as
        `rlframe.megatron.lora.adapters.attach` chooses it."""
        entries = (*lora.target_modules, *lora.exclude_modules, *lora.modules_to_save)
        numbered = any(part.isdigit() for entry in entries for part in entry.split("."))
        key = (parallel.tp, parallel.ep, parallel.etp, kind, layer if numbered else 0, str(lora))
        if key not in self._with_adapters:
            self._with_adapters[key] = self._chosen(self._recorded(parallel, layer, kind), lora)
        return self._with_adapters[key]

    def _chosen(self, layout: MemoryLayout, lora: LoraConfig) -> TrainedBesideBase:
        """Returns what is trained of the parameters of a layout."""
        homes: dict[str, dict[str, list[Box]]] = {}
        for tensor, boxes in layout.boxes.items():
            for box in boxes:
                homes.setdefault(box.parameter, {}).setdefault(tensor, []).append(box)
        found = TrainedBesideBase()
        for name, tensors in homes.items():
            if in_head(name):
                continue
            tied = self.architecture.tie_embeddings and name.endswith("output_layer.weight")
            home = EMBEDDING if tied else name
            whole = math.prod(layout.parameters[name].shape)
            if all(lora.saves(tensor, home) for tensor in tensors):
                gives_logits = name.endswith("output_layer.weight") or (
                    self.architecture.tie_embeddings and home == EMBEDDING
                )
                found = found.plus(name, whole, saved=whole, head=gives_logits)
                continue
            chosen = [
                lora.rank * (sum(box.rows for box in boxes) + boxes[0].cols)
                for tensor, boxes in tensors.items()
                if lora.adapts(tensor, home, dimensions=len(layout.tensors[tensor]))
            ]
            found = found.plus(name, sum(chosen), adapted=whole if chosen else 0)
        return found

    def _recorded(self, parallel: Parallel, layer: int, kind: str | LayerKind) -> MemoryLayout:
        """Returns where the tensors of one layer, or of what is before or after all layers, lie on the first rank."""
        shard = self._shard(parallel, layer, kind)
        shapes = self.family.parameters(self.architecture, shard)
        parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        others = {f".layers.{index}." for index in range(self.architecture.num_layers) if index != layer}
        tensors = {
            name: shape
            for name, shape in self.tensors.items()
            if not (found := LAYER.search(name)) or found[0] not in others
        }
        return record(partial(self.family.load, architecture=self.architecture, shard=shard), parameters, tensors)

    def adapter_widths(self, lora: LoraConfig, layer: int) -> tuple[float, float]:
        """Returns the numbers of a token that the adapters of a layer read, and those that they add to. What Megatron
        keeps in one weight is read once. An expert counts for the tokens that it gets."""
        key = (str(lora), kind_of(self.architecture, layer))
        if key not in self._widths:
            shape, inputs, outputs = self.architecture, dict[str, float](), 0.0
            for name, (rows, columns) in self._matrices(layer):
                module, expert = name.removesuffix(".weight"), in_experts(name)
                if not takes(lora, module) or (expert and not lora.experts):
                    continue
                chosen = shape.experts_per_token / shape.num_experts if expert else 1.0
                parent, _, last = module.rpartition(".")
                fused = next((each for each, parts in MODULES.items() if last in parts), last)
                inputs[f"{parent}.{fused}"] = columns * chosen
                outputs += rows * chosen
            self._widths[key] = (sum(inputs.values()), outputs)
        return self._widths[key]

    def _matrices(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in self.tensors.items():
            if f".layers.{layer}." in name and len(shape) == 2 and name.endswith(".weight"):
                if not is_other(name):
                    yield name, shape


def kind_of(architecture: Architecture, layer: int) -> LayerKind:
    """Returns the kind of a layer."""
    return LayerKind(is_sparse(architecture, layer), architecture.has_gated_delta_net(layer))


def is_other(name: str) -> bool:
    """Returns whether a tensor of a layer is a router's, a norm's or an indexer's, or a bias."""
    return INDEXER in name or name.endswith("bias") or name.removesuffix(".weight").endswith(NOT_ADAPTED)


def is_sparse(architecture: Architecture, layer: int) -> bool:
    """Returns whether a layer has experts."""
    return bool(architecture.num_experts) and architecture.moe_layers[layer]


def takes(lora: LoraConfig, module: str) -> bool:
    """Returns whether train.lora adapts a module of the checkpoint's name."""
    last = module.rpartition(".")[2]

    def named(entry: str) -> bool:
        return f".{module}".endswith(f".{entry}") or last in MODULES.get(entry, ())

    return any(entry == ALL_LINEAR or named(entry) for entry in lora.target_modules) and not any(
        named(entry) for entry in (*lora.exclude_modules, *lora.modules_to_save)
    )
