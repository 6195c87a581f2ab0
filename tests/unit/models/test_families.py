"""What config.json means, and where the pieces of fused parameters lie."""

from typing import Any

import pytest
import torch

from rlframe.models.families.base import Shard
from rlframe.models.families.llama import FAMILY as LLAMA
from rlframe.models.families.qwen2 import FAMILY as QWEN2
from rlframe.models.families.qwen3 import FAMILY as QWEN3
from rlframe.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from rlframe.utils.errors import ConfigError
from unit.models.parameters import empty

HF: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 5,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
}
MOE = HF | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
    "num_hidden_layers": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_qkv_is_stored_by_kv_group_and_cut_between_groups() -> None:
    # 4 query heads and 2 KV heads of width 1: group 0 is q0 q1 k0 v0, group 1 is q2 q3 k1 v1. Rows hold their number:
    # q 0..3, k 10..11, v 20..21.
    a = LLAMA.architecture(HF)
    checkpoint = {name: torch.zeros(shape) for name, shape in LLAMA.tensors(a).items()}
    for name, first in (("q", 0), ("k", 10), ("v", 20)):
        tensor = checkpoint[f"model.layers.0.self_attn.{name}_proj.weight"]
        tensor.copy_((torch.arange(tensor.shape[0]) + first)[:, None].expand_as(tensor))
    fused = _load_one(a, checkpoint, "self_attention.linear_qkv.weight", (8, 4), tp_rank=0, tp_size=1)
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    fused = _load_one(a, checkpoint, "self_attention.linear_qkv.weight", (4, 4), tp_rank=1, tp_size=2)
    assert fused[:, 0].tolist() == [2, 3, 11, 21]


def test_a_tensor_parallel_rank_has_its_gate_rows_over_its_up_rows() -> None:
    # Gate rows 0..3, up rows 10..13: rank 1 of 2 holds 2, 3 and 12, 13.
    a = LLAMA.architecture(HF)
    checkpoint = {name: torch.zeros(shape) for name, shape in LLAMA.tensors(a).items()}
    for name, first in (("gate", 0), ("up", 10)):
        checkpoint[f"model.layers.0.mlp.{name}_proj.weight"].copy_((torch.arange(4) + first)[:, None].expand(4, 4))
    fc1 = _load_one(a, checkpoint, "mlp.linear_fc1.weight", (4, 4), tp_rank=1, tp_size=2)
    assert fc1[:, 0].tolist() == [2, 3, 12, 13]


def test_rows_beyond_the_vocabulary_are_zeroed() -> None:
    # 5 rows padded to 8 over 2 ranks: rank 1 holds row 4 and three rows of padding.
    a = LLAMA.architecture(HF)
    checkpoint = {name: torch.ones(shape) for name, shape in LLAMA.tensors(a).items()}
    shard = Shard(tp_rank=1, tp_size=2, num_layers=0, has_output=False, padded_vocab_size=8)
    parameters = {"embedding.word_embeddings.weight": torch.full((4, 4), 7.0)}
    LLAMA.load(parameters, checkpoint, a, shard)
    assert parameters["embedding.word_embeddings.weight"][:, 0].tolist() == [1, 0, 0, 0]


def test_expert_parallel_rank_takes_its_run_of_experts() -> None:
    a = QWEN3_MOE.architecture(MOE | {"num_hidden_layers": 1})
    names = QWEN3_MOE.tensors(a)
    checkpoint = {name: torch.zeros(shape) for name, shape in names.items()}
    for expert in range(8):
        checkpoint[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"].fill_(expert)
    down = _load_one(
        a, checkpoint, "mlp.experts.local_experts.1.linear_fc2.weight", (4, 16), ep_rank=2, ep_size=4, family=QWEN3_MOE
    )
    # Rank 2 of 4 holds experts 4 and 5.
    assert down.unique().tolist() == [5]


@pytest.mark.parametrize(
    "rope",
    [{"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"} | LLAMA3},
     {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3}],
    ids=["transformers 5", "transformers 4"],
)  # fmt: skip
def test_llama3_rope_is_read_from_both_forms(rope: dict[str, Any]) -> None:
    a = LLAMA.architecture(HF | rope)
    assert a.rope_theta == 5e5
    assert a.rope_scaling == {"rope_type": "llama3"} | LLAMA3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["sliding_attention"]}, "sliding window"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type must be default or llama3, got 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLAMA.architecture(HF | extra)


def test_families_differ_where_they_should() -> None:
    assert QWEN2.architecture(HF | {"model_type": "qwen2"}).qkv_bias
    qwen3 = QWEN3.architecture(HF | {"model_type": "qwen3"})
    assert qwen3.qk_norm and qwen3.head_dim == 128  # transformers' own default, not 4 / 4


def test_dense_and_sparse_layers_follow_the_config() -> None:
    # Every second layer is sparse (1 and 3), and layer 3 is named dense.
    a = QWEN3_MOE.architecture(MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert a.moe_layers == (False, True, False, False)


def test_transformers_5_name_of_the_expert_count_is_read() -> None:
    hf = {key: value for key, value in MOE.items() if key != "num_experts"} | {"num_local_experts": 4}
    assert QWEN3_MOE.architecture(hf).num_experts == 4


def test_faults_name_every_division_that_fails() -> None:
    a = QWEN3_MOE.architecture(MOE)
    assert a.faults(tp=2, ep=8, etp=16) == []
    assert a.faults(tp=4, ep=3, etp=3) == [
        "train.parallel: tp 4 must divide num_kv_heads 2 of qwen3_moe",
        "train.parallel: ep 3 must divide num_experts 8 of qwen3_moe",
        "train.parallel: etp 3 must divide expert_ffn_hidden_size 16 of qwen3_moe",
    ]
    assert LLAMA.architecture(HF).faults(tp=1, ep=2, etp=1) == [
        "train.parallel: ep 2 needs experts, and llama is dense: leave ep at 1"
    ]


def _load_one(
    a: Any, checkpoint: dict[str, Any], name: str, shape: tuple[int, ...], *, family: Any = LLAMA, **rank: int
) -> torch.Tensor:
    """The parameter `name` of layer 0 after loading; the others are given room without a look."""
    parameters = empty(a, Shard(num_layers=1, padded_vocab_size=8, **rank))
    family.load(parameters, checkpoint, a, Shard(num_layers=1, padded_vocab_size=8, **rank))
    found = parameters[f"decoder.layers.0.{name}"]
    assert tuple(found.shape) == shape
    return found
