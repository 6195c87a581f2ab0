"""The planner on whole models: every destination element once, from the right source, whatever the two layouts.

Trainers are laid out as Megatron does it, by the code that the real workers run. Engines are laid out as transformers
does it, by that engine's own loader, or as vLLM does it, by a loader written out here: QKV as blocks, KV heads repeated
where there are fewer than ranks, experts fused and cut by tensor or by expert parallelism, a padded vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlframe.models import shards
from rlframe.models.families.base import Architecture, Shard
from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.rollout.transformers.engine import load_weights
from rlframe.weight_sync.layout.boxes import window
from rlframe.weight_sync.layout.memory import MemoryLayout, record, record_loader
from rlframe.weight_sync.plan.copies import Copy
from rlframe.weight_sync.plan.piecewise import plan_piecewise
from rlframe.weight_sync.plan.planner import Plan, make_plan
from rlframe.weight_sync.proof.digest import digest
from rlframe.weight_sync.proof.shares import cover

pytestmark = pytest.mark.later

MOST_RANKS = 8
SIZES = [1, 2, 4]


@dataclass
class Rank:
    """One rank of either side: what it holds, and how a checkpoint gets there without any recording."""

    layout: MemoryLayout
    load: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    """New parameters, filled from a checkpoint by the side's own loader."""


# Models


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """A small decoder, dense, sparse or mixed. Every family's own differences are fields of Architecture."""
    kv_heads, layers = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    sparse = tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers)))
    width = st.sampled_from([4, 8, 12])
    return Architecture(
        model_type="qwen3_moe",
        hidden_size=draw(st.sampled_from([3, 4, 6])),
        num_layers=layers,
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 2])),
        ffn_hidden_size=draw(width),
        vocab_size=draw(st.integers(5, 13)),
        max_positions=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_experts=draw(st.sampled_from([2, 4])) if any(sparse) else 0,
        experts_per_token=1,
        expert_ffn_hidden_size=draw(width),
        moe_layers=sparse,
    )


def checkpoint_of(a: Architecture, first: int, step: int) -> dict[str, Tensor]:
    """Every tensor, each element a number that no other has: first, first + step, ..."""
    tensors, start = {}, 0
    for name, shape in FAMILY.tensors(a).items():
        size = math.prod(shape)
        tensors[name] = (torch.arange(start, start + size, dtype=torch.float32) * step + first).view(shape)
        start += size
    return tensors


# Megatron


@st.composite
def parallels(draw: st.DrawFn, a: Architecture) -> dict[str, int]:
    """Sizes of a layout that fits the model."""
    axes = ("dp", "tp", "pp", "cp", "ep", "etp")
    fitting = [
        sizes
        for values in itertools.product(SIZES, repeat=len(axes))
        for sizes in [dict(zip(axes, values, strict=True))]
        for world in [sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"]]
        if world <= MOST_RANKS
        and world % (sizes["etp"] * sizes["ep"] * sizes["pp"]) == 0
        and not shards.faults(a, **sizes)
    ]
    sizes = draw(st.sampled_from(fitting))
    stages = sizes["pp"]
    virtual = [count for count in (1, 2) if count == 1 or (stages > 1 and a.num_layers % (stages * count) == 0)]
    return sizes | {"vpp": draw(st.sampled_from(virtual))}


def megatron_ranks(a: Architecture, sizes: dict[str, int]) -> list[Rank]:
    """Every rank of a trainer."""
    world = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"]
    return [megatron_rank(a, shards.shards_of_rank(a, rank, **sizes)) for rank in range(world)]


def megatron_rank(a: Architecture, own: list[Shard]) -> Rank:
    """One of them."""
    fill = partial(shards.load, family=FAMILY, architecture=a, shards=own)
    return rank_of(fill, shards.parameters(FAMILY, a, own), FAMILY.tensors(a))


def rank_of(
    fill: Callable[[dict[str, Tensor], dict[str, Tensor]], None],
    shapes: dict[str, tuple[int, ...]],
    tensors: dict[str, tuple[int, ...]],
) -> Rank:
    """The rank whose loader is `fill`."""

    def load(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameters = poisoned(shapes)
        fill(parameters, dict(checkpoint))
        return parameters

    return Rank(record(fill, poisoned(shapes), tensors), load)


def poisoned(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Parameters full of NaN."""
    return {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}


# Engines


def transformers_ranks(a: Architecture) -> list[Rank]:
    """The one rank of transformers: experts of a layer fused, all else as on disk."""
    shapes = {name: shape for name, shape in FAMILY.tensors(a).items() if ".experts." not in name}
    width, hidden = a.expert_ffn_hidden_size, a.hidden_size
    for layer in (layer for layer, sparse in enumerate(a.moe_layers) if sparse):
        prefix = f"model.layers.{layer}.mlp.experts."
        shapes[f"{prefix}gate_up_proj"] = (a.num_experts, 2 * width, hidden)
        shapes[f"{prefix}down_proj"] = (a.num_experts, hidden, width)
    return [rank_of(load_weights, shapes, FAMILY.tensors(a))]


@dataclass(frozen=True)
class VllmLike:
    """Rank `rank` of `tp`, which cuts experts as the rest or, with `ep`, shares them out whole."""

    a: Architecture
    rank: int
    tp: int
    ep: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter. The vocabulary is padded to a multiple of 4 * tp rows."""
        a, tp = self.a, self.tp
        shapes = {name: shape for name, shape in FAMILY.tensors(a).items() if "norm" in name or "mlp.gate." in name}
        vocabulary = (-(-a.vocab_size // (4 * tp)) * 4, a.hidden_size)
        shapes |= {name: vocabulary for name in FAMILY.tensors(a) if "embed" in name or "lm_head" in name}
        heads, kv_heads = a.num_attention_heads // tp, max(1, a.num_kv_heads // tp)
        for layer, sparse in enumerate(a.moe_layers):
            prefix = f"model.layers.{layer}."
            rows = (heads + 2 * kv_heads) * a.head_dim
            shapes[f"{prefix}self_attn.qkv_proj.weight"] = (rows, a.hidden_size)
            if a.qkv_bias:
                shapes[f"{prefix}self_attn.qkv_proj.bias"] = (rows,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (a.hidden_size, heads * a.head_dim)
            if sparse:
                experts = a.num_experts // tp if self.ep else a.num_experts
                width = a.expert_ffn_hidden_size // (1 if self.ep else tp)
                shapes[f"{prefix}mlp.experts.w13"] = (experts, 2 * width, a.hidden_size)
                shapes[f"{prefix}mlp.experts.w2"] = (experts, a.hidden_size, width)
            else:
                shapes[f"{prefix}mlp.gate_up_proj.weight"] = (2 * a.ffn_hidden_size // tp, a.hidden_size)
                shapes[f"{prefix}mlp.down_proj.weight"] = (a.hidden_size, a.ffn_hidden_size // tp)
        return shapes

    def fill(self, parameters: Mapping[str, Tensor], pairs: Iterable[tuple[str, Tensor]]) -> None:
        """One tensor after the other, each to its place."""
        for name, tensor in pairs:
            prefix, _, last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
            kind = name.rpartition(".")[2]
            if "embed" in name or "lm_head" in name:
                self._vocabulary(parameters[name], tensor)
            elif last in ("q_proj", "k_proj", "v_proj"):
                self._qkv(parameters[f"{prefix}.qkv_proj.{kind}"], tensor, last[0])
            elif last == "o_proj":
                parameters[name].copy_(tensor.chunk(self.tp, dim=1)[self.rank])
            elif ".experts." in name:
                layer, _, expert = prefix.rpartition(".")
                self._expert(parameters[f"{layer}.w{2 if last == 'down_proj' else 13}"], tensor, int(expert), last)
            elif last in ("gate_proj", "up_proj"):
                half = parameters[f"{prefix}.gate_up_proj.weight"].chunk(2)[last == "up_proj"]
                half.copy_(tensor.chunk(self.tp)[self.rank])
            elif last == "down_proj":
                parameters[name].copy_(tensor.chunk(self.tp, dim=1)[self.rank])
            else:
                parameters[name].copy_(tensor)

    def _vocabulary(self, parameter: Tensor, tensor: Tensor) -> None:
        mine = tensor[self.rank * parameter.shape[0] :][: parameter.shape[0]]
        parameter[: mine.shape[0]].copy_(mine)
        parameter[mine.shape[0] :].fill_(0)

    def _qkv(self, parameter: Tensor, tensor: Tensor, which: str) -> None:
        a, tp = self.a, self.tp
        queries, keys = a.num_attention_heads // tp * a.head_dim, max(1, a.num_kv_heads // tp) * a.head_dim
        start = {"q": 0, "k": queries, "v": queries + keys}[which]
        size = queries if which == "q" else keys
        # Fewer KV heads than ranks: neighbouring ranks hold the same head.
        rank = self.rank if which == "q" else self.rank // max(1, tp // a.num_kv_heads)
        parameter[start : start + size].copy_(tensor[rank * size : (rank + 1) * size])

    def _expert(self, parameter: Tensor, tensor: Tensor, expert: int, last: str) -> None:
        if self.ep:
            expert -= self.rank * parameter.shape[0]
            if not 0 <= expert < parameter.shape[0]:
                return
        else:
            tensor = tensor.chunk(self.tp, dim=1 if last == "down_proj" else 0)[self.rank]
        place = parameter[expert]
        (place if last == "down_proj" else place.chunk(2)[last == "up_proj"]).copy_(tensor)

    def as_rank(self) -> Rank:
        """Recorded as an engine is, from a loader that writes into its own parameters."""
        own = poisoned(self.shapes())
        layout = record_loader(lambda pairs: self.fill(own, pairs), own, FAMILY.tensors(self.a))
        assert all(value.isnan().all() for value in own.values())

        def load(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
            parameters = poisoned(self.shapes())
            self.fill(parameters, checkpoint.items())
            return parameters

        return Rank(layout, load)


@st.composite
def engines(draw: st.DrawFn, a: Architecture) -> list[Rank]:
    """The ranks of one engine or two."""
    kind = draw(st.sampled_from(["vllm", "vllm", "transformers", "megatron"]))
    if kind == "megatron":
        return megatron_ranks(a, draw(parallels(a)))
    if kind == "transformers":
        return transformers_ranks(a) * draw(st.integers(1, 2))
    fitting = [
        (tp, ep)
        for tp, ep in itertools.product(SIZES, [False, True] if a.num_experts else [False])
        if a.num_attention_heads % tp == 0 and (a.num_experts % tp == 0 or not ep)
    ]
    tp, ep = draw(st.sampled_from(fitting))
    return [VllmLike(a, rank, tp, ep).as_rank() for rank in range(tp)] * draw(st.integers(1, 2))


# Properties


@st.composite
def cases(draw: st.DrawFn) -> tuple[Architecture, list[Rank], list[Rank], dict[str, list[str]]]:
    """A model, a trainer, engines, and where they all run."""
    a = draw(architectures())
    trainer, engine = megatron_ranks(a, draw(parallels(a))), draw(engines(a))
    hosts, devices = st.sampled_from(["one", "two"]), st.sampled_from(["gpu 0", "gpu 1", "gpu 2", "cpu"])
    places = {
        f"{side}_{kind}s": [draw(values) for _ in ranks]
        for side, ranks in (("source", trainer), ("destination", engine))
        for kind, values in (("host", hosts), ("device", devices))
    }
    return a, trainer, engine, places


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_the_plan_leaves_every_engine_as_its_own_loader_would(
    case: tuple[Architecture, list[Rank], list[Rank], dict[str, list[str]]],
) -> None:
    a, trainer, engine, places = case
    new, old = checkpoint_of(a, 1, 1), checkpoint_of(a, -1, -1)
    ones = {name: torch.ones_like(value) for name, value in new.items()}
    plan = plan_of(trainer, engine, places)
    sources = [rank.load(new) for rank in trainer]
    found = []
    link_bytes: dict[tuple[int, int], int] = {}
    for index, rank in enumerate(engine):
        # Loaded once with another checkpoint, so that padding is what the engine's own loader makes of it.
        parameters = rank.load(old)
        writes = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for copy in plan.copies_for(index):
            view(parameters, copy, write=True).copy_(view(sources[copy.source], copy, write=False))
            view(writes, copy, write=True).add_(1)
            link_bytes[copy.source, index] = link_bytes.get((copy.source, index), 0) + 4 * copy.rows * copy.cols
        expected, once = rank.load(new), rank.load(ones)
        for name, value in parameters.items():
            assert torch.equal(value, expected[name]), name
            # Loading ones leaves 1 in every element and 0 in padding.
            assert torch.equal(writes[name], once[name]), name
        found.append(parameters)
    assert plan.link_bytes == link_bytes
    assert totals(trainer, sources) == totals(engine, found)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_between_equal_layouts_on_the_same_devices_nothing_leaves_its_device(data: st.DataObject) -> None:
    a = data.draw(architectures())
    ranks = megatron_ranks(a, data.draw(parallels(a)))
    hosts, devices = ["one"] * len(ranks), [f"gpu {index}" for index in range(len(ranks))]
    places = {"source_hosts": hosts, "destination_hosts": hosts, "source_devices": devices}
    plan = plan_of(ranks, ranks, places | {"destination_devices": devices})
    assert all(source == destination for source, destination in plan.link_bytes)


def plan_of(trainer: list[Rank], engine: list[Rank], places: dict[str, list[str]]) -> Plan:
    """The plan between them, which is the same whether made with arrays or box by box."""
    sources, destinations = [rank.layout for rank in trainer], [rank.layout for rank in engine]
    plan = make_plan(sources, destinations, **places)
    here, there = (
        list(zip(places[f"{side}_hosts"], places.get(f"{side}_devices", ["cpu"] * len(ranks)), strict=True))
        for side, ranks in (("source", trainer), ("destination", engine))
    )
    by_box = plan_piecewise(sources, destinations, here, there)
    assert [list(copies) for copies in plan.copies] == [list(copies) for copies in by_box]
    return plan


def view(parameters: dict[str, Tensor], copy: Copy, *, write: bool) -> Tensor:
    """One side of a copy."""
    place = copy.write if write else copy.read
    size, stride = (copy.rows, copy.cols), (place.row_stride, place.col_stride)
    return window(parameters[place.parameter], place.offset, size, stride)


def totals(ranks: list[Rank], parameters: list[dict[str, Tensor]]) -> dict[str, int]:
    """The digest of every whole tensor as one side holds it; replicas must agree."""
    shares = [digest(rank.layout, mine) for rank, mine in zip(ranks, parameters, strict=True)]
    covers = cover({index: rank.layout for index, rank in enumerate(ranks)}, side="this side")
    for name, parts in covers.items():
        for holders in parts.values():
            assert len({shares[holder][name] for holder in holders}) == 1, name
    return {
        name: sum(shares[holders[0]][name] for holders in parts.values()) % (1 << 64) for name, parts in covers.items()
    }
