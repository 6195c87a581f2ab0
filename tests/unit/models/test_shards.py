"""Which rank holds what: Megatron's own order of ranks, for layouts far larger than a test can start."""

import math

import pytest
from megatron.core.parallel_state import RankGenerator

from rlframe.models.families.base import Architecture
from rlframe.models.shards import faults, shards_of_rank

# Axes that all differ, so that a swapped pair shows; then the folds of experts over dense axes.
LAYOUTS = [
    {"dp": 3, "tp": 2, "pp": 4, "cp": 5},
    {"dp": 2, "tp": 4, "pp": 2, "cp": 2, "ep": 4, "etp": 2},
    {"dp": 8, "pp": 3, "ep": 2, "etp": 4},
    {"dp": 2, "tp": 4, "pp": 2, "ep": 8},
]
MODEL = Architecture(
    model_type="qwen3_moe", hidden_size=8, num_layers=12, num_attention_heads=8, num_kv_heads=4, head_dim=2,
    ffn_hidden_size=8, vocab_size=13, max_positions=8, rms_norm_eps=1e-6, rope_theta=1e4, num_experts=8,
    expert_ffn_hidden_size=8, moe_layers=(True,) * 12,
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_are_counted_as_megatron_counts_them(layout: dict[str, int]) -> None:
    sizes = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1} | layout
    world = math.prod(sizes[axis] for axis in ("dp", "tp", "pp", "cp"))
    dense = {axis: sizes[axis] for axis in ("tp", "dp", "pp", "cp")} | {"ep": 1}
    experts = {"tp": sizes["etp"], "ep": sizes["ep"], "pp": sizes["pp"], "cp": 1}
    experts["dp"] = world // math.prod(experts.values())
    tp_ranks, pp_ranks = (_places(RankGenerator(**dense, order="tp-cp-ep-dp-pp"), axis) for axis in ("tp", "pp"))
    etp_ranks, ep_ranks = (_places(RankGenerator(**experts, order="tp-cp-ep-dp-pp"), axis) for axis in ("tp", "ep"))
    for rank in range(world):
        (shard,) = shards_of_rank(MODEL, rank, **sizes)
        layers = 12 // sizes["pp"]
        assert (shard.tp_rank, shard.etp_rank, shard.ep_rank) == (tp_ranks[rank], etp_ranks[rank], ep_ranks[rank])
        assert (shard.first_layer, shard.num_layers) == (pp_ranks[rank] * layers, layers)
        assert shard.has_embedding == (pp_ranks[rank] == 0)
        assert shard.has_output == (pp_ranks[rank] == sizes["pp"] - 1)


def _places(generator: RankGenerator, axis: str) -> dict[int, int]:
    """Each rank's place in its group along `axis`."""
    return {rank: place for group in generator.get_ranks(axis) for place, rank in enumerate(group)}


def test_the_vocabulary_is_padded_for_tensor_parallelism() -> None:
    # 13 rows over 4 ranks: 4 each.
    assert shards_of_rank(MODEL, 0, tp=4)[0].padded_vocab_size == 16


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must lie in 0..3, got 4"):
        shards_of_rank(MODEL, 4, dp=2, tp=2)


def test_chunks_of_an_interleaved_pipeline_take_turns() -> None:
    # 12 layers, 2 stages of 3 chunks of 2. Stage 0 has [0 1] [4 5] [8 9], stage 1 has [2 3] [6 7] [10 11].
    for stage, first_layers in enumerate([[0, 4, 8], [2, 6, 10]]):
        chunks = shards_of_rank(MODEL, stage, pp=2, vpp=3)
        assert [(chunk.first_layer, chunk.num_layers) for chunk in chunks] == [(first, 2) for first in first_layers]
        assert [chunk.has_embedding for chunk in chunks] == [stage == 0, False, False]
        assert [chunk.has_output for chunk in chunks] == [False, False, stage == 1]


def test_faults_name_the_numbers_of_a_pipeline_that_does_not_fit() -> None:
    assert faults(MODEL, pp=4) == faults(MODEL, pp=2, vpp=3) == faults(MODEL, pp=3, first_stage_layers=2) == []
    assert [str(fault) for fault in faults(MODEL, tp=8, pp=5)] == [
        "train.parallel: tp 8 must divide num_kv_heads 4 of qwen3_moe",
        "train.parallel: pp 5 must divide num_layers 12 of qwen3_moe",
    ]
    assert [str(fault) for fault in faults(MODEL, pp=3, vpp=8)] == [
        "train.parallel: vpp 8 must divide the 4 layers of stage 0 (pp 3, 12 layers) of qwen3_moe"
    ]
