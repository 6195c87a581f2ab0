"""Bytes that a forward pass keeps for the backward pass, operation by operation.

Source: the operations of Megatron-Core 0.16.1 with Transformer Engine's layers (CUDA) and with rlframe's local ones
(CPU), each of which saves its inputs; Korthikanti et al. 2022, arXiv 2205.05198, section 4, for the split by sequence
parallelism. The rows of the local layers are compared with what autograd really saves in
tests/multiprocess/megatron/test_saved_activations.py, those of CUDA with measured peaks in
examples/benchmarks/results/preflight.md.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlframe.megatron.config.options import Attention, Fp8Recipe, Recompute, RecomputeMethod
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.packed.split_bounds import WIDEST_HEAD
from rlframe.models.families.base import Architecture
from rlframe.ops.prefixes import KEYS_PER_ROW
from rlframe.run.preflight import constants
from rlframe.run.preflight.weights import LayerKind, kind_of
from rlframe.run.preflight.workload import layout_of

FLOAT32 = 4
CHUNK = 64
"""Tokens that the gated delta rule computes at once (megatron/packed/gated_delta_rule.py)."""


class Place(StrEnum):
    """The part of a layer that keeps something, by the names of train.recompute_options.modules where there is one."""

    NORM = "layernorm"
    ATTENTION = "attention"
    CORE = "core_attn"
    MLP = "mlp"
    MOE = "moe"
    ACTIVATION = "moe_act"
    SHARED = "shared_experts"


@dataclass(frozen=True, slots=True)
class Saved:
    """The data that one operation of a layer keeps."""

    what: str
    place: Place
    bytes: float
    """For each token of the layer's share: the micro-batch's tokens divided by tp."""
    instead: float = 0.0
    """Bytes that are kept for each token if the place is recomputed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels of a layer, as far as they decide what is kept."""

    itemsize: int
    """Bytes of an activation."""
    cuda: bool
    """Whether layers are Transformer Engine's, else rlframe's local ones."""
    fused_activation: bool
    fp8: bool = False
    """Whether the inputs of matrix products are kept in 8 bits."""
    keys_per_token: float = 1.0
    """Keys that attention reads for each computed token: more than 1 where sequences share a prompt."""
    splits: bool = False
    """Whether attention to long prompts may be a call of its own, for which no key is kept twice."""

    @classmethod
    def of(cls, train: TrainConfig, *, cuda: bool) -> "Kernels":
        """Returns the kernels of these settings."""
        return cls(
            itemsize=2 if train.dtype == Dtype.BFLOAT16 else 4,
            cuda=cuda,
            fused_activation=cuda and train.kernels.activation_fusion,
            fp8=cuda and train.fp8.recipe is not Fp8Recipe.OFF,
            splits=cuda and not train.deterministic and train.kernels.attention in (Attention.AUTO, Attention.FUSED),
        )

    @property
    def input_size(self) -> int:
        """Bytes of an input of a matrix product, as it is kept."""
        return 1 if self.fp8 else self.itemsize


def layer(architecture: Architecture, kernels: Kernels, parallel: Parallel, kind: LayerKind) -> Iterator[Saved]:
    """Yields what one layer keeps without recomputation."""
    size, hidden = kernels.itemsize, architecture.hidden_size
    yield Saved("input of the attention's norm", Place.ATTENTION, hidden * size)
    if architecture.norm_before:
        yield Saved("output of the attention's norm", Place.NORM, hidden * kernels.input_size)
    if kind.gated_delta:
        yield from _gated_delta_net(architecture, kernels)
    else:
        yield from _latent(architecture, kernels) if architecture.latent else _attention(architecture, kernels)
    yield Saved("input of the MLP's norm", Place.ATTENTION, hidden * size)
    # Transformer Engine fuses the norm with the first product of a dense MLP, and recomputes it with it. The router
    # reads the norm's output, in its own number format.
    fused = kernels.cuda and not kind.sparse
    place = Place.MLP if fused else Place.NORM
    if architecture.norm_before:
        yield Saved("output of the MLP's norm", place, hidden * (kernels.input_size if fused else size))
    if architecture.norm_after:
        yield Saved("inputs of the norms after attention and MLP", Place.ATTENTION, 2 * hidden * size)
    if architecture.gelu:
        kernels = replace(kernels, fused_activation=False)
    yield from (
        _experts(architecture, kernels, parallel)
        if kind.sparse
        else _mlp(architecture.ffn_hidden_size, kernels, Place.MLP)
    )


def _attention(architecture: Architecture, kernels: Kernels) -> Iterator[Saved]:
    size, heads = kernels.itemsize, architecture.num_attention_heads
    queries, keys = heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    if architecture.output_gate:
        yield Saved("gates, and the gated output", Place.ATTENTION, queries * (FLOAT32 + size))
    split = kernels.splits and kernels.keys_per_token >= KEYS_PER_ROW and architecture.head_dim <= WIDEST_HEAD
    if kernels.keys_per_token > 1 and not split:
        yield Saved("shared keys and values again", Place.CORE, 2 * keys * size * (kernels.keys_per_token - 1))
    if not kernels.cuda:
        yield from _local_attention(queries, keys, heads, architecture, size)
        return
    if architecture.qk_norm or architecture.qk_l2_norm:
        yield Saved("inputs of the norms of queries and keys", Place.ATTENTION, (queries + keys) * size)
    yield Saved("queries, keys and values", Place.ATTENTION, (queries + 2 * keys) * size)
    yield Saved("output of the attention", Place.ATTENTION, queries * size)
    if kernels.fp8:
        yield Saved("input of the projection, in 8 bits", Place.ATTENTION, queries)
    yield Saved("logarithms of the softmax's sums", Place.CORE, heads * FLOAT32)


def _local_attention(queries: int, keys: int, heads: int, architecture: Architecture, size: int) -> Iterator[Saved]:
    """Yields the rows of cpu/attention.py: queries, keys and values are copied into grids of padded sequences."""
    if architecture.qk_norm or architecture.qk_l2_norm:
        yield Saved("product of queries, keys and values", Place.ATTENTION, (queries + 2 * keys) * size)
        yield Saved("queries before their norm", Place.ATTENTION, queries * size)
        yield Saved("scales of norms", Place.ATTENTION, (heads + architecture.num_kv_heads) * FLOAT32)
    yield Saved("cosines and sines", Place.ATTENTION, 4 * architecture.head_dim // 2 * FLOAT32)
    grids = 2 * (queries + keys) * size
    yield Saved("grids of queries, keys, values and outputs", Place.CORE, grids, (queries + keys) * size)
    yield Saved("logarithms of the softmax's sums", Place.CORE, heads * FLOAT32)
    yield Saved("output of the attention", Place.ATTENTION, queries * size)


def _latent(architecture: Architecture, kernels: Kernels) -> Iterator[Saved]:
    """Yields the rows of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    shape, size, heads = architecture.latent, kernels.itemsize, architecture.num_attention_heads
    assert shape is not None
    narrow = 2 * ((shape.query_rank or 0) + shape.kv_rank) + shape.rotary_head_dim
    queries = heads * (shape.plain_head_dim + shape.rotary_head_dim)
    values = heads * shape.value_head_dim
    yield Saved("narrow vectors and their norms", Place.ATTENTION, narrow * size)
    yield Saved("queries, keys and values", Place.ATTENTION, (2 * queries + values) * size)
    yield Saved("output of the attention", Place.ATTENTION, values * size)
    yield Saved("logarithms of the softmax's sums", Place.CORE, heads * FLOAT32)


def _gated_delta_net(architecture: Architecture, kernels: Kernels) -> Iterator[Saved]:
    """Yields the rows of a gated delta net: on CUDA those of flash-linear-attention's kernels, from what their
    functions save (fla-core 0.6; not measured), else those of packed/gated_delta_rule.py."""
    net, size = architecture.gated_delta_net, kernels.itemsize
    assert net is not None
    heads = net.num_value_heads
    keys, values = heads * net.key_head_dim, heads * net.value_head_dim
    channels = net.num_key_heads * net.conv_channels
    inputs = net.num_key_heads * net.projected * size
    if kernels.cuda:
        yield Saved("channels before the convolution", Place.CORE, channels * size, inputs)
        # Queries and keys are not repeated for the value heads that they serve.
        yield Saved("queries, keys and values", Place.CORE, channels * size)
        yield Saved("decays, rates, lengths, and the scales of the norm", Place.CORE, 6 * heads * FLOAT32)
        yield Saved("products of the keys in a chunk", Place.CORE, heads * CHUNK * size)
        yield Saved("outputs and gates", Place.CORE, 2 * values * size)
    else:
        yield Saved("channels before and after the convolution", Place.CORE, 2 * channels * size, inputs)
        yield Saved("decays, rates and lengths of keys", Place.CORE, 10 * heads * FLOAT32)
        yield Saved("queries and keys", Place.CORE, (11 * keys + 4 * values) * FLOAT32)
        yield Saved("products of queries and keys in a chunk", Place.CORE, 6 * heads * CHUNK * FLOAT32)
        yield Saved("states before each chunk", Place.CORE, keys * net.value_head_dim / CHUNK * 2 * FLOAT32)
        yield Saved("outputs, norms and gates", Place.CORE, values * (3 * FLOAT32 + 2 * size))
    yield Saved("input of the projection", Place.ATTENTION, values * kernels.input_size)


def _mlp(width: int, kernels: Kernels, place: Place) -> Iterator[Saved]:
    size = kernels.itemsize
    yield Saved("gate and up", place, 2 * width * size)
    if not kernels.fused_activation:
        yield Saved("activated gate and shifted up", place, 2 * width * size)
    yield Saved("input of the second product", place, width * kernels.input_size)


def _experts(architecture: Architecture, kernels: Kernels, parallel: Parallel) -> Iterator[Saved]:
    """Yields the rows of a layer of experts. Each of a token's experts gets the whole token on every rank that shares
    the expert (etp), and the tokens of all those ranks."""
    size, chosen, etp = kernels.itemsize, architecture.experts_per_token, parallel.etp
    width, experts = architecture.expert_ffn_hidden_size, architecture.num_experts
    chosen_rows = chosen * constants.EXPERT_IMBALANCE
    router = 2 * experts * FLOAT32 + experts + (2 * experts + 1) * 4 if kernels.cuda else experts * FLOAT32
    yield Saved("scores and maps of the router", Place.MOE, router)
    yield Saved("sorted inputs", Place.MOE, chosen_rows * architecture.hidden_size * kernels.input_size * etp)
    yield Saved("gate and up", Place.MOE, chosen_rows * 2 * width * size)
    if not kernels.fused_activation:
        # silu, up plus its offset, their product, before the weight of the expert.
        yield Saved("parts of the activation", Place.ACTIVATION, chosen_rows * 3 * width * size)
    yield Saved("inputs of the second product", Place.ACTIVATION, chosen_rows * width * kernels.input_size)
    if architecture.shared_ffn_hidden_size:
        yield from _mlp(architecture.shared_ffn_hidden_size, kernels, Place.SHARED)


def kept(saved: Iterator[Saved], train: TrainConfig) -> float:
    """Returns the bytes a token that a layer keeps with recompute=none or selective."""
    modules = set(train.recompute_options.modules) if train.recompute is Recompute.SELECTIVE else set()
    if "moe" in modules:
        modules |= {"moe_act", "shared_experts"}
    return sum(each.instead if each.place in modules else each.bytes for each in saved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    kept: float
    """From the forward pass to the backward pass."""
    working: float
    """Bytes that recomputing the largest group of layers adds while their part of the backward pass runs. Without
    recomputation, those of one layer."""
    on_host: float = 0.0
    """Bytes that wait in host memory, of which `moved` arrive: pinned memory comes in powers of two."""
    moved: float = 0.0


def of_stage(
    architecture: Architecture,
    train: TrainConfig,
    chunks: Sequence[tuple[int, ...]],
    *,
    tokens: int,
    cuda: bool,
    keys_per_token: float = 1.0,
) -> Activations:
    """Returns the activations of a stage's layers for `tokens` tokens of the rank.

    Args:
        chunks: the layers of each chunk of the stage.
        keys_per_token: see Kernels.
    """
    parallel = layout_of(train.parallel)
    kernels = replace(Kernels.of(train, cuda=cuda), keys_per_token=keys_per_token)
    share = tokens / parallel.tp
    rows_of = {kind: list(layer(architecture, kernels, parallel, kind)) for kind in kinds_of(architecture)}
    whole = {kind: sum(each.bytes for each in rows) * share for kind, rows in rows_of.items()}
    used = {kind: kept(iter(rows), train) * share for kind, rows in rows_of.items()}
    kinds = [[kind_of(architecture, index) for index in chunk] for chunk in chunks]
    boundary = architecture.hidden_size * kernels.itemsize * share
    largest = max(whole.values())
    if train.recompute is not Recompute.FULL:
        return Activations(kept=sum(used[each] for chunk in kinds for each in chunk), working=largest)
    options = train.recompute_options
    if options.method is RecomputeMethod.UNIFORM:
        groups = sum(-(-len(chunk) // options.layers) for chunk in chunks)
        working = options.layers * largest
        if train.offload_activations and cuda:
            pinned = groups * 2 ** math.ceil(math.log2(max(1.0, boundary)))
            # On its way to the host is the last input, and on the device the next.
            return Activations(kept=2 * boundary, working=working, on_host=pinned, moved=groups * boundary)
        return Activations(kept=groups * boundary, working=working)
    again = sum(min(options.layers, len(chunk)) for chunk in chunks)
    rest = sum(whole[each] for chunk in kinds for each in chunk[options.layers :])
    return Activations(kept=again * boundary + rest, working=largest)


def kinds_of(architecture: Architecture) -> Counter[LayerKind]:
    """Returns the number of layers of each kind."""
    return Counter(kind_of(architecture, index) for index in range(architecture.num_layers))


def recomputed_fraction(train: TrainConfig, chunks: Sequence[tuple[int, ...]]) -> float:
    """Returns the part of the forward pass of a stage's layers, chunk by chunk, that is computed twice."""
    if train.recompute is Recompute.FULL:
        options = train.recompute_options
        if options.method is RecomputeMethod.UNIFORM:
            return 1.0
        # A stage may have no layer.
        return sum(min(options.layers, len(chunk)) for chunk in chunks) / max(1, sum(map(len, chunks)))
    if train.recompute is Recompute.SELECTIVE:
        return 0.5 if {"mlp", "moe"} & set(train.recompute_options.modules) else 0.1
    return 0.0
