"""Experts that vLLM's model runner V2 records in decode steps: those that a score of the same tokens finds."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.rollout import SamplingParams
from tests.contracts.engines.trainer import verify
from tests.rollout_models import make_requests, make_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_experts_of_responses_are_those_of_a_score_while_vllm_preempts_requests(tmp_path: Path) -> None:
    folder = make_with_tokenizer("qwen3_moe", tmp_path, head_dim=64)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    # Less than 48 long responses fit into the cache, and less than all run at a time.
    config = VllmConfig(
        gpu_memory_utilization=0.2,
        max_num_seqs=32,
        engine_options={"num_gpu_blocks_override": 150, "block_size": 16},
    )
    engine = VllmEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda", with_routes=True)
    try:
        assert engine._engine.vllm_config.use_v2_model_runner
        verify(engine, 0)
        asked = make_requests(24, group_size=2, sampling=SamplingParams(max_tokens=90, min_tokens=90))
        found = engine.generate(asked)
        whole = [each.input.then(one.token_ids.tolist()) for each, one in zip(asked, found, strict=True)]
        scores = engine.score_with_routes(whole)
    finally:
        engine.close()
    assert sum(len(each.token_ids) for each in found) > 150 * 16, "they cannot all run at the same time"
    differ = []
    for sequence, one, score in zip(whole, found, scores, strict=True):
        assert one.routes is not None and score.routes is not None
        # The last token is sampled, and not computed with.
        assert len(one.routes) == len(score.routes) == len(sequence) - 1
        differ.append((np.sort(one.routes, -1) != np.sort(score.routes, -1)).any(-1).mean())
    # Near ties are rounded otherwise; rows of another token differ in most places.
    assert np.mean(differ) < 0.05 and max(differ) < 0.3, differ
