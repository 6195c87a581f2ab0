"""vLLM on a GPU makes bfloat16 parameters of a quantised checkpoint, and not layers of its number format: the weights
are proved without a transfer, and scores are those of the plain folder."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from tests.contracts.engines.trainer import synced
from tests.quantized_models import quantize
from tests.rollout_models import make_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SEQUENCES = [ModelInput(tuple(range(5, 5 + length))) for length in (3, 17, 40)]


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_scores_are_those_of_the_plain_folder(form: str, tmp_path: Path) -> None:
    make_with_tokenizer("qwen3_moe", tmp_path / "source", moe_intermediate_size=64)
    quantize(tmp_path / "source", form, plain=tmp_path / "plain", quantized=tmp_path / "quantized")
    weights = {name: each.cuda() for name, each in load_file(tmp_path / "plain" / "model.safetensors").items()}
    config = VllmConfig(gpu_memory_utilization=0.2, enforce_eager=True, max_num_seqs=32)
    found = []
    for folder in ("plain", "quantized"):
        engine = VllmEngine(config, folder=tmp_path / folder, dtype=torch.bfloat16, device="cuda")
        try:
            _, _, sync = synced(engine, weights)
            found.append(engine.score(SEQUENCES))
            sync.close()
        finally:
            engine.close()
    assert found[0] == found[1]
