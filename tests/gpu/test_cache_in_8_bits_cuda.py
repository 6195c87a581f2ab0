"""Engines whose keys and values have 8 bits, on a GPU: their logprobs are near those of transformers in float32, and
what FP8 has no number for leaves the rest as it is."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlframe.rollout.base.config import CacheFormat
from rlframe.types.rollout import SamplingParams
from rlframe.utils.registry import find
from tests.contracts.engines.trainer import nats, verify
from tests.rollout_models import make_requests, make_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8"
    ),
]
SHAPE = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "initializer_range": 0.05,
         "max_position_embeddings": 256}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": 32},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 128},
    "gemma3": {"sliding_window": 32, "query_pre_attn_scalar": 64},
}
GRAPHS = {
    "vllm": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8]}},
    "sglang": {"cuda_graph_bs_decode": [8], "disable_prefill_cuda_graph": True},
}
logger = logging.getLogger(__name__)
SAMPLING = SamplingParams(max_tokens=48, min_tokens=48)
FAR = 3e4
"""Where the largest number of float8_e4m3fn is 448."""


def gap_nats(name: str, folder: Path, cache: CacheFormat) -> float:
    """Mean distance of logprobs, of what an engine samples and of prompts that it scores, from transformers'."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    engine_class, config = find("rlframe.rollout", name, key="rollout.name")
    settings = config(name=name, kv_cache_gb=0.5, max_num_seqs=8, kv_cache_dtype=cache, engine_options=GRAPHS[name])
    engine = engine_class(settings, folder=folder, dtype=torch.bfloat16, device="cuda")
    try:
        verify(engine, 0)
        requests = make_requests(8, sampling=SAMPLING, longest=100)
        completions = engine.generate(requests)
        scores = engine.score([request.input for request in requests])
    finally:
        engine.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gaps = []
    for request, completion, score in zip(requests, completions, scores, strict=True):
        tokens = completion.token_ids.tolist()
        gaps.append((torch.tensor(completion.logprobs) - nats(model, request, tokens)).abs())
        prompt = request.input.token_ids.tolist()
        with torch.no_grad():
            table = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = table[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        gaps.append((torch.tensor(score) - expected).abs())
    return float(torch.cat(gaps).mean())


def in_bfloat16(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, rounded."""
    weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


@pytest.mark.parametrize(
    ("name", "family"), [*(("sglang", family) for family in FAMILIES), ("vllm", "qwen3"), ("vllm", "qwen3_moe")]
)
def test_a_family_samples_nearly_what_it_samples_with_a_cache_in_16_bits(
    name: str, family: str, tmp_path: Path
) -> None:
    make_with_tokenizer(family, tmp_path, **SHAPE | FAMILIES[family])
    in_bfloat16(tmp_path)
    plain, eight = (gap_nats(name, tmp_path, cache) for cache in CacheFormat)
    logger.info("%s, %s: gap of %.4g nats, in 8 bits %.4g", name, family, plain, eight)
    assert 0 < plain < 0.03
    assert plain < eight < 0.1


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_what_exceeds_the_numbers_of_the_format_is_held_as_the_largest(name: str, tmp_path: Path) -> None:
    """Channels of queries, keys and values lie far outside of the format, and whatever finite number stands for them
    changes nothing: where keys are far queries are 0, and the other way round, and no output reads the values."""
    make_with_tokenizer("qwen3", tmp_path, **SHAPE | FAMILIES["qwen3"])
    weights = in_bfloat16(tmp_path)
    before = gap_nats(name, tmp_path, CacheFormat.FP8)
    half = SHAPE["head_dim"] // 2
    for key, value in weights.items():
        if key.endswith(("q_norm.weight", "k_norm.weight")):
            # Rotary embeddings turn channel i with channel i + half.
            far, none = (0, 1) if "k_norm" in key else (1, 0)
            value[[far, far + half]], value[[none, none + half]] = FAR, 0
        if key.endswith("v_proj.weight"):
            value.view(-1, SHAPE["head_dim"], value.shape[1])[:, 0] *= FAR
        if key.endswith("o_proj.weight"):
            value.view(value.shape[0], -1, SHAPE["head_dim"])[:, :, 0] = 0
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    after = gap_nats(name, tmp_path, CacheFormat.FP8)
    logger.info("%s: gap of %.4g nats, with far numbers %.4g", name, before, after)
    assert 0 < after < 2 * before
