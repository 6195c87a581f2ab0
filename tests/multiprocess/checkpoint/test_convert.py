"""rlframe.tools.convert both ways: bit for bit, checked by logits, one part of the model in memory at a time."""

import contextlib
import io
import json
import pathlib
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

from rlframe.models.chat_template import text_of
from rlframe.models.config import HEAD
from rlframe.models.hub import EMBEDDED, load_family, read_config
from rlframe.tools.convert import LIMIT_NATS, VERIFIED_TOKENS
from rlframe.utils.errors import CheckpointError
from tests.mtp_models import make_with_mtp
from tests.multiprocess.distributed import run_distributed, template
from tests.tiny_models import make

WITH_MTP = "with_mtp/model"
MODELS = ("qwen3_moe", "qwen3", "llama_scaled", "glm4_moe", "qwen3_next", WITH_MTP)
ASKED = "{% for message in messages %}{{ message.content }}{% endfor %}"
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 4096}
"""52 M parameters: 208 MB in float32, in tensors of 8 MB at most."""


def convert(rank: int, init_method: str, folder: pathlib.Path) -> dict[str, Any]:
    """Every model there and back; how far memory grew over a large one, in bytes, both ways."""
    from rlframe.megatron.messages import chunks  # noqa: PLC0415
    from rlframe.tools.convert import main  # noqa: PLC0415

    for name in MODELS:
        model, there, back = (str(folder / part) for part in (name, f"{name}-there", f"{name}-back"))
        main(["to-megatron", "--model", model, "--out", there, "--dtype", "float32"])
        main(["to-huggingface", "--checkpoint", there, "--model", model, "--out", back, "--dtype", "float32",
              "--shard-gb", "0.0002"])  # fmt: skip
    model, there, back = (str(folder / f"glm4_moe{part}") for part in ("", "-bfloat16", "-bfloat16-back"))
    main(["to-megatron", "--model", model, "--out", there])
    main(["to-huggingface", "--checkpoint", there, "--model", model, "--out", back])
    main(["to-megatron", "--model", str(folder / "long"), "--out", str(folder / "long-there")])
    convert_scored(folder / "scored", folder / "scored-back")
    convert_headless(folder / "qwen3", folder / "headless-back")
    training = shutil.copytree(folder / "qwen3-there", folder / "run" / "checkpoints" / "step-00000001" / "training")
    (folder / "run" / "config.yaml").write_text("data: {chat_template: plain}")
    (folder / "asked.jinja").write_text(ASKED)
    shutil.copytree(EMBEDDED / "qwen3_moe_tiny_tools", folder / "words")
    shutil.copy(folder / "qwen3" / "config.json", folder / "words")
    for out, more in (("of-run", []), ("asked", ["--chat-template", str(folder / "asked.jinja")])):
        main(["to-huggingface", "--checkpoint", str(training), "--model", str(folder / "words"),
              "--out", str(folder / out), *more])  # fmt: skip
    chunks.EXPORT_CHUNK_BYTES = 1 << 24
    model, there, back = (str(folder / part) for part in ("large", "large-there", "large-back"))
    growth = {}
    start = resident_peak()
    main(["to-megatron", "--model", model, "--out", there, "--dtype", "float32"])
    growth["there"] = resident_peak() - start
    main(["to-huggingface", "--checkpoint", there, "--model", model, "--out", back, "--dtype", "float32",
          "--shard-gb", "0.03"])  # fmt: skip
    growth["back"] = resident_peak() - start
    return growth


def convert_scored(folder: pathlib.Path, back: pathlib.Path) -> None:
    """A model with a head of two outputs into a distributed checkpoint, as a critic's is, and back."""
    there = folder.with_name("scored-there")
    there.mkdir()
    there_and_back(folder, there, back, outputs=2, said="has a head of 2 outputs")


def convert_headless(folder: pathlib.Path, back: pathlib.Path) -> None:
    """A model without a head into the checkpoint of a run that trains embeddings, and back."""
    run = folder.with_name("embedding")
    training = run / "checkpoints" / "step-00000001" / "training"
    training.mkdir(parents=True)
    (run / "config.yaml").write_text("algorithm: {name: embedding}")
    there_and_back(folder, training, back, outputs=0, said="has no head")


def there_and_back(folder: pathlib.Path, there: pathlib.Path, back: pathlib.Path, *, outputs: int, said: str) -> None:
    """A model of so many outputs into a distributed checkpoint, and back. What is said of it when it is verified."""
    from rlframe.megatron.worker.convert import one_rank, skeleton, to_megatron  # noqa: PLC0415 - see on_rank
    from rlframe.models.checkpoint import CheckpointReader  # noqa: PLC0415
    from rlframe.tools.convert import Dtype, main  # noqa: PLC0415

    family = load_family(folder)
    with one_rank():
        bones = skeleton(family, family.architecture(read_config(folder)).with_outputs(outputs), Dtype.FLOAT32)
        to_megatron(CheckpointReader(folder), bones, there)
    asked = ["to-huggingface", "--checkpoint", str(there), "--model", str(folder), "--dtype", "float32", "--out"]
    main([*asked, str(back)])
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit):
        main([*asked, str(folder / "verified"), "--verify"])
    assert said in printed.getvalue()


def convert_one(rank: int, init_method: str, model: str, out: str) -> None:
    """A distributed checkpoint of `model`, in bfloat16."""
    from rlframe.tools.convert import main  # noqa: PLC0415 - see convert

    main(["to-megatron", "--model", model, "--out", out])


def resident_peak() -> int:
    """Bytes that this process has held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Models in Hugging Face format."""
    folder = tmp_path_factory.mktemp("convert")
    for name in MODELS:
        if name == WITH_MTP:
            make_with_mtp("glm4_moe", (folder / name).parent)
        else:
            make(name, folder / name)
    make("mixtral", folder / "long", num_hidden_layers=3)
    make("qwen3_tied", folder / "scored")
    file = folder / "scored" / "model.safetensors"
    save_file(load_file(file) | {HEAD: torch.randn(2, 64)}, file, metadata={"format": "pt"})
    large = transformers.Qwen3Config(**LARGE, head_dim=64, num_attention_heads=8, num_key_value_heads=4)
    transformers.AutoModelForCausalLM.from_config(large, dtype=torch.float32).save_pretrained(folder / "large")
    return folder


@pytest.fixture(scope="module")
def growth(folder: pathlib.Path) -> dict[str, Any]:
    """What a process of its own did. Its memory grows from nothing."""
    return run_distributed(convert, 1, folder, bare=True)[0]


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_the_same_model(name: str, folder: pathlib.Path, growth: dict[str, Any]) -> None:
    disk = load_file(folder / name / "model.safetensors")
    back = folder / f"{name}-back"
    index = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(index.values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        for key, value in load_file(back / file).items():
            assert index[key] == file and torch.equal(disk.pop(key), value), key
    assert not disk
    token_ids = torch.arange(20)[None]
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (back, folder / name)
    )
    with torch.no_grad():
        assert torch.equal(ours(token_ids).logits, theirs(token_ids).logits)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_the_head_of_a_model_that_gives_values_is_exported(folder: pathlib.Path, growth: dict[str, Any]) -> None:
    disk, back = (load_file(folder / name / "model.safetensors") for name in ("scored", "scored-back"))
    assert disk.keys() == back.keys() and all(torch.equal(disk[name], value) for name, value in back.items())
    config = read_config(folder / "scored-back")
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 2


def test_a_model_of_embeddings_is_exported_without_a_head(folder: pathlib.Path, growth: dict[str, Any]) -> None:
    disk, back = (load_file(folder / name / "model.safetensors") for name in ("qwen3", "headless-back"))
    assert disk.keys() - back.keys() == {"lm_head.weight"}
    assert all(torch.equal(disk[name], value) for name, value in back.items())
    assert read_config(folder / "headless-back")["architectures"] == ["Qwen3Model"]


def test_the_exported_model_has_the_chat_template_of_its_run_or_the_one_asked_for(
    folder: pathlib.Path, growth: dict[str, Any]
) -> None:
    for out, text in (("of-run", text_of("plain")), ("asked", ASKED)):
        assert (folder / out / "chat_template.jinja").read_text() == text


def test_the_model_is_never_in_memory_as_a_whole(folder: pathlib.Path, growth: dict[str, Any]) -> None:
    size = (folder / "large" / "model.safetensors").stat().st_size
    assert size > 2e8
    # There: a parameter and the tensors it is made of. Back: a chunk of 17 MB and what is copied of it, and a file of
    # 30 MB. The rest is the allocator's.
    assert growth["there"] < size / 2 and growth["back"] < size * 0.75


def test_a_routing_bias_stays_in_float32(folder: pathlib.Path, growth: dict[str, Any]) -> None:
    disk, back = (load_file(folder / name / "model.safetensors") for name in ("glm4_moe", "glm4_moe-bfloat16-back"))
    biases = [name for name in disk if name.endswith("e_score_correction_bias")]
    # Values that bfloat16 has no room for, so that a detour through it would show.
    assert biases and all(not torch.equal(disk[name], disk[name].bfloat16().float()) for name in biases)
    assert disk.keys() == back.keys()
    for name, value in disk.items():
        expected = value if name in biases else value.bfloat16()
        assert back[name].dtype == expected.dtype and torch.equal(back[name], expected), name


def test_verification_passes_a_checkpoint_of_more_precision_than_the_model(
    folder: pathlib.Path, growth: dict[str, Any]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlframe.tools.convert", "to-huggingface", "--checkpoint", folder / "glm4_moe-there",
         "--model", folder / "glm4_moe", "--out", folder / "verified", "--dtype", "bfloat16", "--verify"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (folder / "verified").exists(), done.stderr
    assert float(done.stderr.rpartition("at most ")[2].split()[0]) < 1e-4


def config_of(model: pathlib.Path, folder: pathlib.Path, **changes: Any) -> None:
    """A config.json that is not that of the model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(read_config(model) | changes))


def refusals(folder: pathlib.Path) -> tuple[str, str]:
    """What is said of a checkpoint of another model and of one of adapters, and of one with the same tensors but other
    values."""
    from rlframe.megatron.cpu import platform  # noqa: PLC0415 - see load_for_training
    from rlframe.tools.convert import main, verify  # noqa: PLC0415

    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        main(["to-huggingface", "--checkpoint", str(folder / "qwen3-there"), "--model", str(folder / "qwen3_moe"),
              "--out", str(folder / "refused")])  # fmt: skip
    for other in ("tied", "wide"):
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
            main(["to-huggingface", "--checkpoint", str(folder / "qwen3-there"), "--model", str(folder / other),
                  "--out", str(folder / "refused")])  # fmt: skip
    for name in ("adapters", "above/training"):
        dcp.save({"lora.base_model.x.lora_A.weight": torch.zeros(1)}, checkpoint_id=folder / name, no_dist=True)
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        main(["to-huggingface", "--checkpoint", str(folder / "adapters"), "--model", str(folder / "qwen3"),
              "--out", str(folder / "refused")])  # fmt: skip
    for wrong in (folder / "above", folder / "gone"):
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
            main(["to-huggingface", "--checkpoint", str(wrong), "--model", str(folder / "qwen3"),
                  "--out", str(folder / "refused")])  # fmt: skip
    platform.install(torch.device("cpu"))
    from rlframe.megatron.worker.convert import one_rank  # noqa: PLC0415

    architecture = load_family(folder / "qwen3").architecture(read_config(folder / "qwen3"))
    with one_rank(), pytest.raises(CheckpointError) as refusal:
        verify(architecture, folder / "swapped", folder / "qwen3-there", torch.float32)
    return said.getvalue(), str(refusal.value)


@pytest.fixture(scope="module")
def refused(folder: pathlib.Path, growth: dict[str, Any]) -> tuple[str, str]:
    """See refusals. In a process that may have children, which run_distributed's may not."""
    config_of(folder / "qwen3", folder / "tied", tie_word_embeddings=True)
    config_of(folder / "qwen3", folder / "wide", vocab_size=68)
    swapped = shutil.copytree(folder / "qwen3", folder / "swapped")
    tensors = load_file(swapped / "model.safetensors")
    # The mistake that conversion is prone to: heads in another order.
    key = tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = key.view(2, 32, -1).flip(0).reshape(key.shape).contiguous()
    save_file(tensors, swapped / "model.safetensors", metadata={"format": "pt"})
    with ProcessPoolExecutor(1, mp_context=template()) as pool:
        return pool.submit(refusals, folder).result()


def test_a_checkpoint_of_another_model_is_refused(folder: pathlib.Path, refused: tuple[str, str]) -> None:
    assert "does not hold this model" in refused[0]
    assert "it has 1 weights more than the model, such as output_layer.weight" in refused[0]
    assert "embedding.word_embeddings.weight has 67 rows for 68 tokens" in refused[0]
    assert f"{folder / 'adapters'} holds adapters (train.lora) without the model that they belong to" in refused[0]
    assert f"got {folder / 'above'} without .metadata; write --checkpoint {folder / 'above/training'}" in refused[0]
    assert f"got {folder / 'gone'}, which is no folder" in refused[0]
    assert "is not an option" not in refused[0]
    assert not (folder / "refused").exists()


@torch.no_grad()
def test_verification_refuses_swapped_heads_and_says_where(folder: pathlib.Path, refused: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 67, (VERIFIED_TOKENS,), generator=generator)[None]
    wrong, right = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(token_ids).logits[0]
        for path in (folder / "swapped", folder / "qwen3")
    )
    gaps = (wrong.log_softmax(-1) - right.log_softmax(-1)).abs()
    assert gaps.max() > 100 * LIMIT_NATS
    position, token = divmod(int(gaps.argmax()), 67)
    assert f"differ by up to {gaps.max():.3g} nats" in refused[1]
    assert f"token {token} after position {position}, transformers gives" in refused[1]


def load_for_training(rank: int, init_method: str, folder: pathlib.Path) -> dict[str, Any]:
    """This rank's weights, and those of the reference, where training begins with a converted checkpoint."""
    from rlframe.megatron.cpu import platform  # noqa: PLC0415 - the platform must be installed before Megatron

    platform.install(torch.device("cpu"))
    from rlframe.megatron.config.train import TrainConfig  # noqa: PLC0415
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415
    from rlframe.models.config import ModelConfig  # noqa: PLC0415

    def setup(model: str, layout: str) -> TrainerSetup:
        return TrainerSetup(
            rank=rank, init_method=f"{init_method}-{model}", device=torch.device("cpu"),
            model=ModelConfig(path=str(folder / model), random_init=True),
            train=TrainConfig(parallel=layout, dtype="float32"), seed=0, temperature=1.0,
            total_optimizer_steps=1, timeout_s=60, with_reference=True,
        )  # fmt: skip

    for model, said in (("short", r"it has \d+ weights more than the model, such as decoder.layers.2"),
                        ("longer", "has 67 rows for 69 tokens")):  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            Trainer(setup(model, "d1p2")).load_weights(folder / "long-there")
        parallel.shutdown()
    trainer = Trainer(setup("qwen3_moe", "d1t2|ffn:d1t1e2"))
    trainer.verify(folder / "qwen3_moe-there")
    trainer.load_weights(folder / "qwen3_moe-there")
    live = trainer.export(list(trainer.layout.tensors), torch.float32)
    with trainer.reference.active():
        reference = trainer.export(list(trainer.layout.tensors), torch.float32)
    return {"live": live, "reference": reference}


def test_training_begins_with_a_converted_model(folder: pathlib.Path, growth: dict[str, Any]) -> None:
    config_of(folder / "long", folder / "short", num_hidden_layers=2)
    config_of(folder / "long", folder / "longer", num_hidden_layers=2, vocab_size=69)
    disk = load_file(folder / "qwen3_moe" / "model.safetensors")
    for rank in run_distributed(load_for_training, 2, folder):
        for held in rank.values():
            assert any(held.values())
            for name, pieces in held.items():
                matrix = disk[name].view(-1, disk[name].shape[-1])
                for (row, rows, col, cols), values in pieces:
                    assert torch.equal(matrix[row : row + rows, col : col + cols], values), name
