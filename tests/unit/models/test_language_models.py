"""The recipe of rlframe/models/README.md that saves the language model of a model with images."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlframe.models.hub import EMBEDDED, load_family, read_config

README = Path("rlframe/models/README.md")
TEXT: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}),
    "mistral3": (
        "Mistral3",
        {
            "text_config": TEXT | {"model_type": "ministral3"},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "text_config": TEXT | {"intermediate_size_mlp": 40, "num_local_experts": 4},
            "vision_config": VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        },
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGS)
def test_the_language_model_has_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, values = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**values)
    whole: PreTrainedModel = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED / "qwen3_moe_tiny")
    tokenizer.save_pretrained(tmp_path / "whole")

    (recipe,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    script = tmp_path / "recipe.py"
    script.write_text(recipe)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "whole"), str(tmp_path / "language")])
    runpy.run_path(str(script))

    family = load_family(tmp_path / "language")
    disk = load_file(tmp_path / "language" / "model.safetensors")
    shapes = {name: tuple(value.shape) for name, value in disk.items()}
    assert shapes == family.tensors(family.architecture(read_config(tmp_path / "language")))
    ids = torch.arange(12)[None]
    language = AutoModelForCausalLM.from_pretrained(tmp_path / "language").eval()
    with torch.no_grad():
        assert torch.equal(language(ids).logits, whole(input_ids=ids).logits)
