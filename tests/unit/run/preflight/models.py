"""Plans of published dimensions on H200, from config.json alone."""

import json
from pathlib import Path
from typing import Any

from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.plan import Plan, plan
from tests.unit.tools.test_plan_sync import QWEN3_30B

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
    "head_dim": 128,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
CUDA = ["train=cuda", "cluster=cuda", "rollout=vllm", "rollout.max_tokens=4096", "prompts_per_step=64"]


def folder(path: Path, hf: dict[str, Any]) -> str:
    """A model that has a config.json and nothing else."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf))
    return str(path)


def planned(path: Path, hf: dict[str, Any], *overrides: str, device: str = "h200") -> Plan:
    """The plan of GRPO with `hf` on such devices."""
    run = load("grpo_qwen3_moe", [*CUDA, f"model.path={folder(path, hf)}", *overrides])
    return plan(run, algorithm_of(run), KINDS[device])


MOE = QWEN3_30B
STATES: dict[str, Any] = QWEN3_4B | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 256,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 5120,
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Qwen3-Next-80B-A3B."""
SPARSE: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 163840,
    "attention_bias": False,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
"""DeepSeek-V3.2."""
