"""A GGUF file, written by llama.cpp's own package, becomes a model folder with the values that it says the file has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlframe.models import gguf, tokenizer
from rlframe.models.hub import load_family, read_config, read_json
from rlframe.tools.convert import main
from rlframe.utils.errors import CheckpointError

pytestmark = pytest.mark.later

pytest.importorskip("accelerate")
package = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 96, 2
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's weights, there and here."""


def vocabulary() -> list[str]:
    """A token for each byte, as byte-level tokenizers write them, and one of two letters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), "th"]


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the weights by their names in the file."""
    width = HIDDEN // HEADS * KV_HEADS
    layer = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
    layer |= {"attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN), "ffn_down": (HIDDEN, MLP)}
    layer |= {"ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN)}
    found = {f"blk.{index}.{name}.weight": shape for index in range(LAYERS) for name, shape in layer.items()}
    return found | {"token_embd.weight": (len(vocabulary()), HIDDEN), "output_norm.weight": (HIDDEN,)}


def write(file: Path) -> dict[str, np.ndarray]:
    """The values that the package says the file has, by their names in it: norms in float32, the embedding in 8 bits,
    the rest in 4."""
    writer = package.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary()])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kinds, values = package.GGMLQuantizationType, {}
    generator = np.random.default_rng(0)
    for name, shape in shapes().items():
        value = generator.normal(size=shape).astype(np.float32)
        kind = kinds.F32 if len(shape) == 1 else kinds.Q8_0 if name.startswith("token") else kinds.Q4_1
        data = quants.quantize(value, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def expected(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The same values by their names in Hugging Face format, whose halves of a rotated head lie one behind the other;
    llama.cpp has their rows in turns."""
    found = {
        "model.embed_tokens.weight": values["token_embd.weight"],
        "model.norm.weight": values["output_norm.weight"],
    }
    for index in range(LAYERS):
        for theirs, ours in NAMES.items():
            value = values[f"blk.{index}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                heads = HEADS if theirs == "attn_q" else KV_HEADS
                value = value.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(value.shape)
            found[f"model.layers.{index}.{ours}.weight"] = value
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_the_dequantised_ones_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    values = expected(write(tmp_path / "small.gguf"))
    main(["from-gguf", "--gguf", str(tmp_path / "small.gguf"), "--out", str(tmp_path / "model"), "--dtype", dtype])
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == values.keys()
    assert [name for name in found if not torch.equal(found[name], values[name].to(getattr(torch, dtype)))] == []


def test_the_folder_has_all_that_a_run_reads(tmp_path: Path) -> None:
    write(tmp_path / "small.gguf")
    gguf.to_hugging_face(tmp_path / "small.gguf", tmp_path / "model", dtype=torch.bfloat16)
    config: dict[str, Any] = read_config(tmp_path / "model")
    architecture = load_family(tmp_path / "model").architecture(config)
    assert (architecture.num_layers, architecture.hidden_size, architecture.tie_embeddings) == (LAYERS, HIDDEN, True)
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    made = tokenizer.load(tmp_path / "model")
    assert made.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "<|im_start|>the<|im_end|>"
    tokens = made("<|im_start|>the<|im_end|>", add_special_tokens=False)["input_ids"]
    assert [made.convert_ids_to_tokens(token) for token in tokens] == ["<|im_start|>", "th", "e", "<|im_end|>"]
    assert made.eos_token == "<|im_end|>"
    assert read_json(tmp_path / "model" / "generation_config.json")["eos_token_id"] == 2


def test_a_package_is_named_in_the_place_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "llm_small"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('no code of the package is run')")
    with pytest.raises(CheckpointError, match="the package llm-small must ship one GGUF file, got none"):
        gguf.find("llm-small")
    (folder / "one.gguf").write_bytes(b"GGUF")
    assert gguf.find("llm-small") == gguf.find("llm_small") == folder / "one.gguf"
    (folder / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"got .*one.gguf, .*two.gguf; name the file"):
        gguf.find("llm-small")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither a file nor an installed package"),
        (b"PK\x03\x04", "is not a GGUF file: it does not begin with the letters GGUF"),
        (b"GGUF", "transformers cannot read"),
    ],
)
def test_what_is_no_model_is_a_sentence(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["from-gguf", "--gguf", str(file), "--out", str(tmp_path / "model")])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == ([] if content is None else [file])
