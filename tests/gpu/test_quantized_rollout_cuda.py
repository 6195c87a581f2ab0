"""Engines in FP8 blocks on a GPU: what Megatron trains is quantised, sent and proved, and engines compute with it as
with a checkpoint that they have loaded by themselves."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlframe.loops.online import OnlineLoop
from rlframe.loops.probe import difference
from rlframe.megatron.memory.quantized import QuantizedWeights
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized import blocks, stated
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.models.quantized.fp8 import Fp8
from rlframe.rollout.served.quantized import quantized_weights
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from rlframe.weight_sync.channel import WeightSource, WeightSync
from tests.contracts.engines.trainer import OneEngine, Trainer, perturbed
from tests.gpu.test_weight_sync_cuda import NOISE_NATS, checkpoint, engine_digests, greedy, running, tokens
from tests.rollout_models import make_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8"
    ),
]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
logger = logging.getLogger(__name__)
FP8 = Fp8((128, 128))
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 128}  # fmt: skip
TINY_NATS, MID_NATS = 0.5, 0.06
"""Bounds of the mean gap to the trainer in bfloat16: of a tiny model whose random weights make extreme logits, and of
the shape of Qwen3-0.6B with weights of the size at which training begins. An H100 has 0.13 to 0.17 and 0.017 to 0.020.
Wrong scales move it by several nats."""
LENGTHS = (3, 17, 40)
BY_ITSELF = """
import json, sys
from vllm import LLM, SamplingParams
folder, out, lengths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
            gpu_memory_utilization=0.2, moe_backend="triton")
asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
found = []
for length in lengths:
    prompt = list(range(5, 5 + length))
    (answer,) = model.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    found.append([each[token].logprob for token, each in zip(prompt[1:], answer.prompt_logprobs[1:])])
with open(out, "w") as file:
    json.dump(found, file)
"""
"""A program that scores sequences with vLLM alone, of which rlframe knows nothing."""


def gap(loop: OnlineLoop) -> float:
    """Mean difference of the engine's logprobs of fixed tokens from the trainer's, in nats."""
    assert loop.probe is not None
    with loop.phase("probe", on=loop.policy):
        trainer = loop.probe.trainer_nats(loop.policy)
    with loop.phase("probe", on=loop.rollout):
        (engine,) = loop.rollout.score(loop.probe.sequences)
    return difference(0, engine, trainer).mean_nats


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_synced_engine_equals_a_fresh_one_of_the_exported_checkpoint(kind: str, name: str, tmp_path: Path) -> None:
    engine = {"name": name, "tp": 1, "quantization": "fp8_block"}
    model = checkpoint(kind, tmp_path / "initial")
    exported = tmp_path / "exported"
    exported.mkdir()
    with running(tmp_path / "run", model, "d1", engine, True, "cuda_ipc") as loop:
        first = gap(loop)
        before = greedy(loop)
        for step in (1, 2):
            loop.step(step)
        # The weights were dropped for training.
        loop.weight_sync.restore()
        second = gap(loop)
        with loop.phase("evaluation", on=loop.rollout):
            after = greedy(loop)
            loop.weight_sync.audit()
        loop.policy.prove()
        synced = engine_digests(loop)
        write_checkpoint(exported, loop.policy.export(torch.bfloat16))
        copy_sidecars(model, exported, dtype=torch.bfloat16)
    logger.info("%s, %s: gap %.4g, then %.4g nats", name, kind, first, second)
    assert 0 < first < TINY_NATS and 0 < second < TINY_NATS
    assert tokens(before) != tokens(after)
    with running(tmp_path / "fresh", exported, "d1", engine, True, "cuda_ipc") as loop:
        # `online` has calibrated: the engine has quantised its load of the export as the trainer quantises its own.
        fresh = greedy(loop)
        assert synced == engine_digests(loop)
    assert tokens(fresh) == tokens(after)
    for mine, theirs in zip(fresh, after, strict=True):
        assert mine.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=NOISE_NATS[name])


@needs_vllm
def test_a_mid_model_is_near_the_trainer_and_a_cache_in_8_bits_too(tmp_path: Path) -> None:
    model = checkpoint("dense", tmp_path / "initial")
    config = json.loads((model / "config.json").read_text())
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02,
             "layer_types": ["full_attention"] * 8}  # fmt: skip
    (model / "config.json").write_text(json.dumps(config | shape))
    found = {}
    for cache in ("auto", "fp8"):
        engine = {"tp": 1, "quantization": "fp8_block", "kv_cache_dtype": cache}
        with running(tmp_path / cache, model, "d1", engine, True, "cuda_ipc", random_init=True) as loop:
            loop.step(1)
            loop.weight_sync.restore()
            found[cache] = gap(loop)
    logger.info("gap in nats by cache: %s", found)
    assert 0 < found["auto"] < MID_NATS and 0 < found["fp8"] < MID_NATS
    assert found["auto"] != found["fp8"]


def test_training_and_sampling_in_fp8_blocks_of_the_same_scales(tmp_path: Path) -> None:
    model = checkpoint("dense", tmp_path / "initial")
    engine = {"tp": 1, "quantization": "fp8_block_powers_of_2"}
    trained: dict[str, Any] = {
        "train.fp8.recipe": "blockwise",
        "train.fp8.format": "e4m3",
        "algorithm.correction.weight": "token",
        "algorithm.correction.weight_cap": "2",
    }
    with running(tmp_path / "run", model, "d1", engine, True, "cuda_ipc", **trained) as loop:
        first = gap(loop)
        for step in (1, 2, 3):
            loop.step(step)
        loop.weight_sync.restore()
        second = gap(loop)
        assert loop.weight_sync.policy_version == 3
    logger.info("both sides in FP8: gap %.4g, then %.4g nats", first, second)
    assert 0 < first < TINY_NATS and 0 < second < TINY_NATS


@needs_vllm
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_vllm_alone_scores_the_same_after_loading_the_quantised_folder(name: str, tmp_path: Path) -> None:
    folder, hub = tmp_path / "initial", tmp_path / "hub"
    make_with_tokenizer(name, folder, **WIDE, **({"moe_intermediate_size": 128} if "moe" in name else {}))
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.2, "enforce_eager": True, "max_model_len": 128}
    config = VllmConfig(quantization=EngineFormat.FP8_BLOCK, **settings)
    engine = VllmEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda")
    weights = load_file(folder / "model.safetensors")
    try:
        trainer = Trainer({key: value.cuda() for key, value in weights.items()})
        sent = QuantizedWeights(trainer.source.layout, trainer.parameters, EngineFormat.FP8_BLOCK)
        trainer.source = WeightSource(sent.layout, sent.parameters)
        sync = WeightSync(trainer, OneEngine(engine))
        sync.connect()
        sync.calibrate(version=0)
        new = perturbed(weights, seed=4)
        trainer.train({key: value.cuda() for key, value in new.items()})
        sent.update()
        sync.publish(version=1)
        scores = [engine.score([ModelInput(np.arange(5, 5 + length))])[0] for length in LENGTHS]
        sync.close()
    finally:
        engine.close()
    hub.mkdir()
    stored = dict(quantized_weights(new.items(), EngineFormat.FP8_BLOCK, dtype=torch.bfloat16, device="cpu"))
    plain = {key: value.bfloat16() if value.dtype is torch.float32 and key in new else value
             for key, value in stored.items()}  # fmt: skip
    save_file(plain, hub / "model.safetensors", {"format": "pt"})
    family = load_family(folder)
    tensors = family.tensors(family.architecture(read_config(folder)))
    hf = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16", stated.KEY: blocks.statement(tensors)}
    (hub / "config.json").write_text(json.dumps(hf))
    command = [sys.executable, "-c", BY_ITSELF, str(hub), str(tmp_path / "scores.json"), json.dumps(LENGTHS)]
    alone = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    done = subprocess.run(command, env=dict(os.environ) | alone, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for mine, theirs in zip(scores, json.loads((tmp_path / "scores.json").read_text()), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on the CPU."""
    return value.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("powers_of_2", [False, True])
def test_a_gpu_quantises_as_a_cpu_bit_for_bit(powers_of_2: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 2560, generator=generator)
    weight *= 2.0 ** torch.randint(-40, 4, weight.shape, generator=generator)
    weight[:128, :128] = 0
    mine = FP8.quantize(weight.bfloat16(), powers_of_2=powers_of_2)
    theirs = FP8.quantize(weight.bfloat16().cuda(), powers_of_2=powers_of_2)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(mine, theirs, strict=True))
    # And by the kernel, in parts: some rows, and all columns but the first 128.
    from rlframe.models.quantized.fp8_kernels import QuantizeTable  # noqa: PLC0415 - Triton exists only with CUDA

    held = weight.bfloat16().cuda()
    values, scales = torch.zeros_like(theirs[0]), torch.zeros_like(theirs[1])
    places = [(slice(0, 256), slice(0, 2560)), (slice(256, 1024), slice(0, 128)), (slice(256, 1024), slice(128, 2560))]
    parts = []
    for rows, cols in places:
        grid = slice(rows.start // 128, rows.stop // 128), slice(cols.start // 128, cols.stop // 128)
        parts.append((held[rows, cols], values[rows, cols], scales[grid]))
    QuantizeTable(parts, powers_of_2=powers_of_2).run()
    assert torch.equal(bits(values), bits(mine[0])) and torch.equal(scales.cpu(), mine[1])


def test_powers_of_two_are_the_weights_with_which_transformer_engine_computes() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed")
    import transformer_engine.pytorch  # noqa: F401 - which loads the library that the next import names
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    weight = torch.randn(512, 768, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    quantizer = Float8BlockQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=True, block_scaling_dim=2
    )
    theirs = quantizer(weight).dequantize(dtype=torch.float32)
    mine = FP8.dequantize([each.cpu() for each in FP8.quantize(weight, powers_of_2=True)], torch.float32)
    assert torch.equal(mine, theirs.cpu())
