"""Computes which part of the model each rank of a parallel layout holds, without starting a process."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from rlframe.models.families.base import Architecture, Family, Shard
from rlframe.models.quantized.blocks import SIZE
from rlframe.models.stages import chunk_layers
from rlframe.utils.faults import Fault

Value = TypeVar("Value")


def shards_of_rank(
    architecture: Architecture,
    rank: int,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    **stages: Any,
) -> list[Shard]:
    """Returns what rank `rank` of dp * tp * pp * cp holds when Megatron-Core lays out the ranks: one Shard per chunk.

    Megatron counts ranks in the order tp-cp-ep-dp-pp, the first fastest, twice: for dense layers with ep 1; for experts
    with cp 1, etp for tp, and the rest of the world for dp (`RankGenerator` in megatron-core 0.16.1; the layout tests
    compare with the real groups). Both counts end with pp, so a rank has one pipeline stage.

    Args:
        architecture: must fit the layout: `faults` is empty.
        stages: vpp, first_stage_layers, last_stage_layers and pipeline_layout of `stages.chunk_layers`.

    Raises:
        ValueError: `rank` is outside the world.
    """
    world = dp * tp * pp * cp
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..{world - 1}, got {rank}")
    counts = chunk_layers(architecture.num_layers, pp=pp, **stages)
    return [
        Shard(
            tp_rank=rank % tp,
            tp_size=tp,
            ep_rank=rank // etp % ep,
            ep_size=ep,
            etp_rank=rank % etp,
            etp_size=etp,
            first_layer=sum(counts[:chunk]),
            num_layers=counts[chunk],
            has_embedding=chunk == 0,
            has_output=chunk == len(counts) - 1,
            padded_vocab_size=padded_vocab_size(architecture, tp=tp),
        )
        for chunk in range(rank // (tp * cp * dp), len(counts), pp)
    ]


def faults(
    architecture: Architecture,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    dp: int = 1,
    cp: int = 1,
    communication: str | None = None,
    dynamic: bool = False,
    **stages: Any,
) -> list[Fault]:
    """Returns a fault for every reason why a parallel layout does not fit a model. The arguments are those of
    `shards_of_rank`, and of `Architecture.faults`."""
    found = architecture.faults(tp=tp, ep=ep, etp=etp, cp=cp, communication=communication, dynamic=dynamic)
    try:
        chunk_layers(architecture.num_layers, pp=pp, **stages)
    except ValueError as error:
        found.append(Fault("train.parallel", said=f"{error} of {architecture.model_type}"))
    return found


def padded_vocab_size(architecture: Architecture, *, tp: int) -> int:
    """Returns the rows of the embedding: the vocabulary rounded up to a multiple of tp."""
    return -(-architecture.vocab_size // tp) * tp


def by_chunk_name(chunks: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Returns the entries of all chunks of a rank under unique names: unchanged if there is one chunk, behind
    `chunks.0.`, `chunks.1.` and so on otherwise."""
    if len(chunks) == 1:
        return dict(chunks[0])
    return {f"chunks.{index}.{name}": value for index, chunk in enumerate(chunks) for name, value in chunk.items()}


def parameters(family: Family, architecture: Architecture, shards: Sequence[Shard]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every Megatron parameter of a rank that holds `shards`, as `Family.parameters` does for
    one."""
    return by_chunk_name([family.parameters(architecture, shard) for shard in shards])


def load(
    parameters: Mapping[str, Tensor],
    checkpoint: Mapping[str, Tensor],
    *,
    family: Family,
    architecture: Architecture,
    shards: Sequence[Shard],
) -> None:
    """Fills the parameters of all chunks of a rank, as `Family.load` does for one."""
    for index, shard in enumerate(shards):
        prefix = f"chunks.{index}." if len(shards) > 1 else ""
        own = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
        family.load(own, checkpoint, architecture, shard)


def uneven_blocks(architecture: Architecture, *, tp: int, expert_tp: int) -> Iterator[tuple[str, int]]:
    """Yields the words and the number of each size of a rank's part of a matrix that is not a whole number of FP8
    blocks.

    Args:
        tp: ranks over which attention and dense layers are split.
        expert_tp: ranks over which each expert is split.
    """
    width, dense = architecture.head_dim, not all(architecture.moe_layers)
    sizes = {
        "hidden_size": architecture.hidden_size,
        f"num_attention_heads * head_dim / {tp}": architecture.num_attention_heads * width // tp,
        f"num_kv_heads * head_dim / {tp}": max(1, architecture.num_kv_heads // tp) * width,
    }
    if dense:
        sizes[f"ffn_hidden_size / {tp}"] = architecture.ffn_hidden_size // tp
    if architecture.num_experts:
        sizes[f"expert_ffn_hidden_size / {expert_tp}"] = architecture.expert_ffn_hidden_size // expert_tp
    if architecture.shared_ffn_hidden_size:
        sizes[f"shared_ffn_hidden_size / {tp}"] = architecture.shared_ffn_hidden_size // tp
    for words, size in sizes.items():
        if size % SIZE:
            yield words.removesuffix(" / 1"), size
