"""Rules for models with gated delta nets: engines on a CPU, splits, adapters, also of Phi-3's fused matrices."""

import json
from pathlib import Path

import pytest

from tests.unit.run.check.test_check import QWEN3_MOE, copy_tokenizer, faults

STATES = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def model(folder: Path, model_type: str) -> str:
    """A model of this type without weights."""
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE | STATES | {"model_type": model_type}))
    copy_tokenizer(folder)
    return str(folder)


@pytest.mark.thorough
def test_the_embedded_engine_serves_them(tmp_path: Path) -> None:
    assert faults(model(tmp_path, "qwen3_next"), "train.parallel=d1t2", "train.lora.rank=4") == []


def test_vllm_on_a_cpu_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.run.check.machines.devices.missing", lambda _: False)
    folder = model(tmp_path, "qwen3_next")
    assert faults(folder, "rollout=vllm") == [
        "rollout.dtype must be bfloat16 for qwen3_next on a CPU, where vLLM has no other kernel for gated delta nets, "
        "got float32; or use rollout.name=transformers",
        "rollout.enable_prefix_caching must be false for qwen3_next on a CPU, where vLLM cannot keep the states of "
        "gated delta nets, got true",
    ]
    fitting = ["rollout=vllm", "rollout.dtype=bfloat16", "rollout.enable_prefix_caching=false"]
    assert faults(folder, *fitting) == []
    split = faults(folder, *fitting, "rollout.tp=4")
    assert split == ["rollout.name=vllm: tp 4 must divide linear_num_key_heads 2 of qwen3_next"]


@pytest.mark.thorough
def test_key_heads_are_split_over_tensor_and_context_parallelism(tmp_path: Path) -> None:
    (fault,) = faults(model(tmp_path, "qwen3_next"), "train.parallel=d1t2c2")
    assert fault == "train.parallel: tp * cp 4 must divide linear_num_key_heads 2 of qwen3_next"


@pytest.mark.thorough
def test_adapters_of_split_matrices_are_refused_with_tensor_parallelism(tmp_path: Path) -> None:
    folder = model(tmp_path, "qwen3_5_moe_text")
    lora = ["train.parallel=d1t2", "train.lora.rank=4"]
    (fault,) = faults(folder, *lora)
    assert fault.startswith("train.lora.exclude_modules must hold in_proj_qkv with tp 2")
    assert faults(folder, *lora, "train.lora.exclude_modules=[in_proj_qkv]") == []
    assert faults(folder, "train.lora.rank=4") == []


@pytest.mark.thorough
def test_all_matrices_of_phi3_that_a_rank_holds_in_pieces_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | {"model_type": "phi3"}))
    copy_tokenizer(tmp_path)
    lora = ["train.parallel=d1t2", "train.lora.rank=4"]
    (fault,) = faults(str(tmp_path), *lora)
    assert fault.startswith("train.lora.exclude_modules must hold gate_up_proj and qkv_proj with tp 2")
    assert faults(str(tmp_path), *lora, "train.lora.exclude_modules=[qkv_proj,gate_up_proj]") == []
