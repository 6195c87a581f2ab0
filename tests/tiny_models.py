"""Small random models of every family, in Hugging Face format, made by transformers itself."""

import inspect
import json
import pathlib
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rlframe.models.transformers_config import SAME_AS

COMMON: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Larger than the default, so that a wrong weight shows in the logits.
    "initializer_range": 0.15,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = ROUTED | {
    "num_key_value_heads": 4,
    # Of the real model's tokenizer.
    "eos_token_id": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
GATED_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MSCALE: dict[str, Any] = {"mscale": 0.7, "mscale_all_dim": 1.0}
"""The two differ, so that one in place of the other shows."""
LARGE_EPS = 0.01
"""Of norms that are not those of latent vectors, whose epsilon is 1e-6: one in place of the other shows."""
INDEXED: dict[str, Any] = LATENT | {
    # Fewer than the tokens of most sequences, so that a choice that is not made shows.
    "index_topk": 6,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "rms_norm_eps": LARGE_EPS,
    "mlp_layer_types": ["dense", "sparse"],
    "bos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "llama_scaled": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_tied": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None},
    ),
    "glm4_moe": ("Glm4MoeConfig", ROUTED | {"head_dim": 32, "attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3Config", LATENT | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32, "pad_token_id": None}),
    # Windows shorter than the sequences, so that one that is not there shows.
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 6}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "pad_token_id": None}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "pad_token_id": None,
            # Queries grow within the sequences.
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "qwen3_yarn": ("Qwen3Config", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen2_linear": (
        "Qwen2Config",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "olmo2": ("Olmo2Config", {"pad_token_id": None, "eos_token_id": None}),
    "olmo3": (
        "Olmo3Config",
        {
            "pad_token_id": None,
            "eos_token_id": None,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "pad_token_id": None,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 80,
            # A dense layer with positions and chunks, and one of experts without.
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "exaone4": ("Exaone4Config", {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {"sliding_window": 6, "partial_rotary_factor": 0.5, "pad_token_id": None}),
    "granite": (
        "GraniteConfig",
        # Neither 1, nor the root of 1 / head_dim, nor all exact in bfloat16.
        {
            "embedding_multiplier": 3.3,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3_yarn": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": None, "rope_parameters": YARN | MSCALE, "rms_norm_eps": LARGE_EPS},
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        LATENT
        | {
            "n_shared_experts": 1,
            "rms_norm_eps": LARGE_EPS,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0},
        },
    ),
    "deepseek_v32": ("DeepseekV32Config", INDEXED | {"rope_parameters": YARN | MSCALE}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", INDEXED),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            # As on the hub: half of a head, and what vLLM reads.
            "rotary_dim": 16,
            # Releases of transformers before 5.19 do not read rotary_dim.
            "partial_rotary_factor": 0.5,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        LATENT | {"n_shared_experts": 1, "rms_norm_eps": LARGE_EPS, "pad_token_id": None},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        GATED_DELTA_NET
        | {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", GATED_DELTA_NET),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        GATED_DELTA_NET
        | {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # Shorter than the sequences, so that a window that is not there shows.
            "sliding_window": 6,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}


def make(name: str, folder: pathlib.Path, **changes: Any) -> transformers.PreTrainedModel:
    """Write the model `name`, with `changes` to its config, to `folder` in float32 and return it."""
    class_name, own = MODELS[name]
    take_back_from_vllm(getattr(transformers, class_name))
    config = getattr(transformers, class_name)(**(COMMON | own | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "limit") and hasattr(config, "swiglu_limit"):
            # transformers 5.17 clamps GPT-OSS's activation at 7 whatever the configuration says, 5.19 as it says.
            module.limit = config.swiglu_limit
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norms and biases start as ones and zeros, which would hide a swap.
            if parameter_name.endswith("A_log"):
                # The published ones forget nearly all of the state at each token.
                parameter.uniform_(-4, 0)
            elif parameter.dim() == 1 or parameter_name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in parameter_name else 0.1))
        for buffer_name, buffer in model.named_buffers():
            # Wide enough to change the choice of experts.
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    if name in SAME_AS:
        name_anew(folder, name)
    return model.eval()


def take_back_from_vllm(config_class: Any) -> None:
    """Undo what vLLM wrote into transformers' own classes when it loaded a model in this process: the type of another
    model whose configuration it reads with this class, and its compilation of a model that it has no code for."""
    known = [name for name, each in CONFIG_MAPPING_NAMES.items() if each == config_class.__name__]
    if config_class.model_type not in known:
        config_class.model_type = known[0]
    decoder: Any = transformers.MODEL_MAPPING[config_class]
    if decoder.__init__.__module__.startswith("vllm."):
        decoder.__init__ = inspect.getclosurevars(decoder.__init__).nonlocals["old_init"]
        del decoder.__call__
        decoder.__bases__ = tuple(base for base in decoder.__bases__ if not base.__module__.startswith("vllm."))


def name_anew(folder: pathlib.Path, model_type: str) -> None:
    """Write into the config of a model that transformers wrote under another type what its hub has besides: the type,
    the name of code that nothing runs, and keys that only this code and vLLM read."""
    file = folder / "config.json"
    own = {"model_type": model_type, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    own |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))


def on_disk(name: str, value: torch.Tensor, model_type: str = "") -> dict[str, torch.Tensor]:
    """transformers holds experts fused; the checkpoint, and so our layout, names them one by one.

    GPT-OSS alone has them fused on disk too, and Mixtral has names of its own, which MiniMax-M2 shares.
    """
    sparse = model_type in ("mixtral", "minimax_m2")
    if model_type in ("gpt_oss", "llama4_text") or "mlp.experts." not in name and not sparse:
        return {name: value}
    gate, up, down = ("w1", "w3", "w2") if sparse else ("gate_proj", "up_proj", "down_proj")
    if sparse:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if name.endswith("experts.gate_up_proj"):
        prefix = name.removesuffix("gate_up_proj")
        return {
            f"{prefix}{index}.{projection}.weight": half
            for index, both in enumerate(value)
            for projection, half in zip((gate, up), both.chunk(2), strict=True)
        }
    if name.endswith("experts.down_proj"):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{index}.{down}.weight": expert for index, expert in enumerate(value)}
    return {name: value}
