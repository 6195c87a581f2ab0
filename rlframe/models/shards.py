"""Which part of the model each rank of a parallel layout holds, known without starting a process."""

from rlframe.models.families.base import Architecture, Shard


def shard_of_rank(
    architecture: Architecture,
    rank: int,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
) -> Shard:
    """What rank `rank` of dp * tp * pp * cp holds when Megatron-Core lays out the ranks.

    Megatron counts ranks in the order tp-cp-ep-dp-pp, the first fastest, twice: the dense layers with ep 1, the experts
    with cp 1, etp for tp, and for dp what is left of the world (`RankGenerator` in megatron-core 0.16.1; the layout
    tests compare with the real groups). Both counts end with pp, so a rank has one pipeline stage.

    Args:
        architecture: fits the layout: `Architecture.faults` is empty.

    Raises:
        ValueError: there is no such rank.
    """
    world = dp * tp * pp * cp
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..{world - 1}, got {rank}")
    stage, layers = rank // (tp * cp * dp), architecture.num_layers // pp
    return Shard(
        tp_rank=rank % tp,
        tp_size=tp,
        ep_rank=rank // etp % ep,
        ep_size=ep,
        etp_rank=rank % etp,
        etp_size=etp,
        first_layer=stage * layers,
        num_layers=layers,
        has_embedding=stage == 0,
        has_output=stage == pp - 1,
        padded_vocab_size=padded_vocab_size(architecture, tp=tp),
    )


def padded_vocab_size(architecture: Architecture, *, tp: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of tp."""
    return -(-architecture.vocab_size // tp) * tp
