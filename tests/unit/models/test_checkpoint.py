"""Reading and writing safetensors checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

from rlframe.models.chat_template import Exported
from rlframe.models.checkpoint import INDEX, SINGLE, CheckpointReader, copy_sidecars, write_checkpoint
from rlframe.models.hub import EMBEDDED
from rlframe.models.inspection import tensor_files
from rlframe.utils.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.full((2, 2), 3.0)}


def assert_holds(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    reader = CheckpointReader(folder)
    assert reader.names == sorted(tensors)
    for name, value in tensors.items():
        assert reader.shape(name) == tuple(value.shape)
        assert torch.equal(reader.tensor(name), value)


def test_a_small_checkpoint_is_one_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=1000)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert_holds(tmp_path, TENSORS)
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    (tmp_path / "other").touch()
    assert (tmp_path / SINGLE).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_shards_keep_to_the_limit_and_have_an_index(tmp_path: Path) -> None:
    # 24 + 16 bytes fit 40; c needs a file of its own.
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=40)
    assert_holds(tmp_path, TENSORS)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == 24 + 16 + 16


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=40)
    write_checkpoint(tmp_path, {"d": torch.zeros(2)}.items())
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=40)
    assert_holds(tmp_path, TENSORS)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_buffer_may_be_reused_while_streaming(tmp_path: Path) -> None:
    buffer = torch.empty(2)
    write_checkpoint(tmp_path, ((name, buffer.fill_(value)) for name, value in (("x", 1.0), ("y", 2.0))))
    assert_holds(tmp_path, {"x": torch.ones(2), "y": torch.full((2,), 2.0)})


def test_an_export_that_dies_leaves_the_old_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=40)

    def dies():
        yield "a", torch.zeros(2, 3)
        yield "b", torch.zeros(4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, dies(), max_shard_bytes=20)
    assert_holds(tmp_path, TENSORS)


def test_a_truncated_file_is_named_with_the_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=40)
    damaged = tmp_path / "model-00002-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4])
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.tensor("a"), TENSORS["a"])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: tensor c cannot be read"):
        reader.tensor("c")


def test_a_garbled_single_file_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        CheckpointReader(tmp_path)


def test_missing_files_and_tensors_are_listed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor"):
        CheckpointReader(tmp_path)
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=40)
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="has no tensor d"):
        reader.tensor("d")
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names files that do not exist: .*model-00001-of-00002"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("stated", "tokenizer", "expected"),
    [
        # A list stays one; null is nothing; what config.json has under text_config counts where it has none itself.
        ({"eos_token_id": [3, 4], "pad_token_id": None}, False, {"eos_token_id": [3, 4]}),
        ({"bos_token_id": 2, "text_config": {"eos_token_id": 5, "bos_token_id": 6}}, False,
         {"bos_token_id": 2, "eos_token_id": 5}),
        # The embedded tokenizer: <|pad|> 0, <|end|> 1, no beginning.
        ({}, True, {"eos_token_id": 1, "pad_token_id": 0}),
        ({"eos_token_id": 1, "pad_token_id": 7, "bos_token_id": 2}, True,
         {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}),
        ({"eos_token_id": [8, 1]}, True, {"eos_token_id": [1, 8], "pad_token_id": 0}),
        ({}, False, {}),
    ],
)  # fmt: skip
def test_an_export_has_a_generation_config_where_the_source_has_none(
    stated: dict[str, Any], tokenizer: bool, expected: dict[str, Any], tmp_path: Path
) -> None:
    source, folder = tmp_path / "source", tmp_path / "export"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3"} | stated))
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(EMBEDDED / "qwen3_moe_tiny" / name, source / name)
    copy_sidecars(source, folder, dtype=torch.float32)
    assert json.loads((folder / "generation_config.json").read_text()) == expected
    loaded = GenerationConfig.from_pretrained(folder)
    assert {key: getattr(loaded, key) for key in expected} == expected


def test_a_generation_config_that_is_there_is_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"eos_token_id": 3}')
    (source / "generation_config.json").write_text('{"eos_token_id": 4, "top_p": 0.9}')
    copy_sidecars(source, tmp_path / "export", dtype=torch.float32)
    kept = (tmp_path / "export" / "generation_config.json").read_text()
    assert kept == '{"eos_token_id": 4, "top_p": 0.9}'


@pytest.mark.parametrize("keys", [(), ("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_an_export_states_its_number_format_wherever_the_source_states_one(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3"} | dict.fromkeys(keys, "float32")))
    copy_sidecars(source, tmp_path / "export", dtype=torch.bfloat16)
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written == {"model_type": "qwen3"} | dict.fromkeys(keys or ("dtype",), "bfloat16")


def test_an_export_has_no_adapter_of_the_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "adapter_config.json", "tokenizer.json"):
        (source / name).write_text("{}")
    copy_sidecars(source, tmp_path / "export", dtype=torch.bfloat16)
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert names == {"config.json", "tokenizer.json", "generation_config.json"}


def test_an_export_has_all_chat_templates_of_the_source(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "export"
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "qwen3_moe_tiny")
    tokenizer.chat_template = {"default": "d", "tool_use": "t"}
    tokenizer.save_pretrained(source)
    shutil.copy(EMBEDDED / "qwen3_moe_tiny" / "config.json", source)
    copy_sidecars(source, folder, dtype=torch.bfloat16)
    assert AutoTokenizer.from_pretrained(folder).chat_template == {"default": "d", "tool_use": "t"}
    Exported(text="own", end_token_id=None).write(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "own"


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    config = Qwen3Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=11, max_position_embeddings=16,
    )  # fmt: skip
    source, folder = tmp_path / "source", tmp_path / "export"
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    reader = CheckpointReader(source)
    copy_sidecars(source, folder, dtype=torch.bfloat16)
    write_checkpoint(folder, ((name, reader.tensor(name).bfloat16()) for name in reader.names), max_shard_bytes=500)
    assert (folder / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, reader.tensor(name).bfloat16())


def test_one_file_of_weights_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=40)
    write_checkpoint(tmp_path / "other", TENSORS.items())
    shutil.copyfile(tmp_path / "other" / SINGLE, tmp_path / SINGLE)
    for read in (CheckpointReader, tensor_files):
        with pytest.raises(CheckpointError, match=f"has {SINGLE}, and {INDEX}, which names other files"):
            read(tmp_path)
