"""Small random models of every family, in Hugging Face format, made by transformers itself."""

import pathlib
from typing import Any

import torch
import transformers

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
}


def make(name: str, folder: pathlib.Path, **changes: Any) -> transformers.PreTrainedModel:
    """Write the model `name`, with `changes` to its config, to `folder` in float32 and return it."""
    class_name, own = MODELS[name]
    config = getattr(transformers, class_name)(**(COMMON | own | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norms and biases start as ones and zeros, which would hide a swap.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in parameter_name else 0.1))
    model.save_pretrained(folder)
    return model.eval()
