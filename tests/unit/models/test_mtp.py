"""Heads for multi-token prediction in checkpoints: names, recording, inspection."""

import json
import pathlib

import pytest
import torch
from safetensors.torch import save_file

from rlframe.models import inspection, shards
from rlframe.models.families.base import Architecture
from rlframe.models.families.glm4_moe import FAMILY as GLM
from rlframe.models.families.qwen3_5_text import FAMILY as QWEN
from rlframe.weight_sync.layout.memory import clear_padding, export_tensor, load_tensor, record

COMMON = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
WITH_EXPERTS = COMMON | {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
STATES = COMMON | {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
}
CASES = {"glm4_moe": (GLM, WITH_EXPERTS), "qwen3_5": (QWEN, STATES)}
LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "ep": 2}]


def head(name: str) -> tuple[Architecture, dict[str, tuple[int, ...]]]:
    """The architecture with the head, and the tensors that it adds."""
    family, hf = CASES[name]
    whole = family.architecture(hf)
    kept = whole.keeping_mtp(True)
    without = family.tensors(whole)
    return kept, {key: shape for key, shape in family.tensors(kept).items() if key not in without}


def test_names_are_those_of_the_published_checkpoints() -> None:
    _, glm = head("glm4_moe")
    own = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    assert list(glm)[:4] == [f"model.layers.2.{name}" for name in own]
    assert glm["model.layers.2.eh_proj.weight"] == (16, 32)
    assert {"model.layers.2.self_attn.q_proj.weight", "model.layers.2.mlp.experts.3.down_proj.weight"} <= glm.keys()
    _, qwen = head("qwen3_5")
    own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    assert list(qwen)[:4] == [f"mtp.{name}.weight" for name in own]
    assert {"mtp.layers.0.self_attn.q_norm.weight", "mtp.layers.0.mlp.gate_proj.weight"} <= qwen.keys()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_kept_head_is_loaded_and_exported_bit_for_bit(name: str, layout: dict[str, int]) -> None:
    if "ep" in layout and name == "qwen3_5":
        return
    family, (kept, added) = CASES[name][0], head(name)
    whole = family.tensors(kept)
    values = {key: torch.randn(shape) for key, shape in whole.items()}
    exported = {key: torch.full(shape, torch.nan) for key, shape in added.items()}
    sizes = {"dp": 1, "tp": 1, "pp": 1, "ep": 1} | layout
    for rank in range(sizes["dp"] * sizes["tp"] * sizes["pp"]):
        (shard,) = shards.shards_of_rank(kept, rank, **sizes)
        held = {key: torch.empty(shape) for key, shape in family.parameters(kept, shard).items()}
        assert shard.has_output == any(key.startswith("mtp_head.") for key in held)
        layout_of_rank = record(lambda ours, theirs, shard=shard: family.load(ours, theirs, kept, shard), held, whole)
        clear_padding(layout_of_rank, held)
        for key, value in values.items():
            load_tensor(layout_of_rank, held, key, value)
        for key, out in exported.items():
            export_tensor(layout_of_rank, held, key, out)
    assert all(torch.equal(exported[key], values[key]) for key in added)


def test_only_language_models_keep_a_head_and_only_where_there_is_one() -> None:
    family, hf = CASES["glm4_moe"]
    assert not family.architecture(hf).with_outputs(1).keeping_mtp(True).with_mtp
    assert not family.architecture(hf | {"num_nextn_predict_layers": 0}).keeping_mtp(True).with_mtp
    assert not family.architecture(hf).keeping_mtp(False).with_mtp


@pytest.mark.parametrize("name", CASES)
def test_a_head_that_is_in_the_files_is_no_fault_and_one_that_lacks_is_if_kept(
    name: str, tmp_path: pathlib.Path
) -> None:
    (family, hf), (kept, added) = CASES[name], head(name)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tensors = {key: torch.randn(shape) for key, shape in family.tensors(kept).items()}
    if name == "glm4_moe":
        # Copies that the published files have beside the head.
        tensors |= {f"model.layers.2.{key}.weight": torch.randn(37, 16) for key in ("embed_tokens", "shared_head.head")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert inspection.has_mtp(tmp_path)
    for keep in (False, True):
        assert inspection.model_faults(tmp_path, num_outputs=None, with_mtp=keep) == []
    without = {key: tensors[key] for key in family.tensors(family.architecture(hf))}
    save_file(without, tmp_path / "model.safetensors")
    assert not inspection.has_mtp(tmp_path)
    assert inspection.model_faults(tmp_path, num_outputs=None) == []
    (fault,) = inspection.model_faults(tmp_path, num_outputs=None, with_mtp=True)
    assert f"lacks {len(added)} tensors" in fault
