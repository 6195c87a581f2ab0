"""What stands for the models and the datasets of recipes where there is no hub: config.json as published, or shrunk,
with a byte-level tokenizer; a few records in the shape of each dataset.

The dimensions are those of the models' config.json on the hub.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlframe.models.hub import EMBEDDED, load_family, read_config
from rlframe.models.random_init import random_tensor

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "eos_token_id": 1,
}
"""Common to the dense ones. The token that ends a text is that of the tokenizer here."""
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288},
    "Qwen/Qwen3-32B": QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64},
    "Qwen/Qwen3-30B-A3B": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "smollm2_135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
        "eos_token_id": 1,
    },
}
MODELS["Qwen/Qwen3-8B-Base"] = MODELS["Qwen/Qwen3-8B"] | {"max_position_embeddings": 32768}
SHRUNK = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
}
SHRUNK_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def make_model(path: str, folder: Path, *, shrunk: bool) -> Path:
    """`folder`, with config.json and tokenizer of the model that a recipe calls `path`, but no weights."""
    config = MODELS[path]
    if shrunk:
        config = config | SHRUNK | (SHRUNK_EXPERTS if "num_experts" in config else {})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(EMBEDDED / "qwen3_moe_tiny_tools" / name, folder / name)
    return folder


def make_corpus(folder: Path) -> Path:
    """A file of documents for the tool search."""
    file = folder / "corpus.jsonl"
    file.write_text('{"title": "Here", "text": "It is there."}\n')
    return file


def draw_weights(folder: Path) -> None:
    """Writes random weights, for a model that a run does not draw itself."""
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    draw = partial(random_tensor, zero_centered_norms=architecture.zero_centered_norms, seed=0, device="cpu")
    tensors = {name: draw(name, shape) for name, shape in family.tensors(architecture).items()}
    save_file(tensors, folder / "model.safetensors")


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _records(path: str) -> list[dict[str, Any]]:
    numbers = range(40)
    shapes = {
        "openai/gsm8k:main": [{"question": f"{a} + 1?", "answer": f"Add.\n#### {a + 1}"} for a in numbers],
        "open-r1/DAPO-Math-17k-Processed:en": [{"prompt": f"{a} + 1?", "solution": str(a + 1)} for a in numbers],
        "search_task/questions.jsonl": [{"prompt": f"Where is {a}?", "answer": "There."} for a in numbers],
        "yahma/alpaca-cleaned": [{"instruction": "Add 1.", "input": str(a), "output": str(a + 1)} for a in numbers],
        "trl-lib/ultrafeedback_binarized": [
            {"chosen": _turns(f"{a} + 1?", str(a + 1)), "rejected": _turns(f"{a} + 1?", "no")} for a in numbers
        ],
        "argilla/ultrafeedback-binarized-preferences-cleaned-kto": [
            {"prompt": f"{a} + 1?", "completion": str(a + 1), "label": a % 2 == 0} for a in numbers
        ],
    }
    return shapes[path]


def make_data(path: str, file: Path) -> str:
    """The path of `file`, with records as the dataset `path` has them; a dataset that is built in is its own."""
    if "/" not in path:
        return path
    file.write_text("".join(f"{json.dumps(record)}\n" for record in _records(path)))
    return str(file)
