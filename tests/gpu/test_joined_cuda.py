"""Responses of an engine whose layers leave what lies between two attentions to one kernel, and whose short steps are
captured, beside those of vLLM's own parts."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, SamplingParams
from tests.contracts.engines.trainer import verify
from tests.rollout_models import make_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "max_position_embeddings": 1024,
}
"""The smallest that the kernel takes."""
PROMPTS = [tuple(3 + (7 * place + 11 * number) % 60 for place in range(83)) for number in range(2)]
LENGTHS = [30, 50, 70, 90, 110, 110]
"""Of responses. Whenever one ends, the others are captured anew. Two requests are at the end, then none."""


def parts_of(worker: Any) -> tuple[int, bool]:
    """Returns how many layers of a worker are joined, and whether the steps before its last requests ended were
    captured. vLLM executes it in the worker."""
    from rlframe.rollout.vllm.decode.joined import JOINED

    runner = worker.model_runner
    steady = getattr(runner.prepare_inputs, "__self__", None)
    begin, ends = getattr(steady, "_begin", None), getattr(steady, "_ends", {})
    return sum(hasattr(layer, JOINED) for layer in runner.get_model().modules()), begin is not None and bool(ends)


@pytest.fixture(scope="module", params=["qwen3_tied", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with norms of queries and keys, and one with biases."""
    folder = make_with_tokenizer(request.param, tmp_path_factory.mktemp("model"), **SIZES)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def sampled(folder: Path, **options: Any) -> tuple[list[Completion], tuple[int, bool]]:
    """Responses to two prompts, some at another temperature and with stops forbidden, and `parts_of` the engine, which
    is made for them."""
    config = VllmConfig(kv_cache_gb=1.0, max_num_seqs=16, max_model_len=256, compile=False, engine_options=options)
    engine = VllmEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda")
    try:
        verify(engine, 0)
        requests = [
            GenerationRequest(
                input=ModelInput(PROMPTS[index % 2]),
                sampling=SamplingParams(max_tokens=length, min_tokens=length, temperature=0.7 if index == 5 else 1.0),
                seed=index,
            )
            for index, length in enumerate(LENGTHS)
        ]
        completions = engine.generate(requests)
        (parts,) = engine._wait(engine._engine.collective_rpc(parts_of), doing="parts_of")
        return completions, parts
    finally:
        engine.close()


def gaps(folder: Path, completions: list[Completion]) -> torch.Tensor:
    """How far the engine's logprob of each token is from transformers' in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    found = []
    for index, completion in enumerate(completions):
        assert len(completion.token_ids) == LENGTHS[index]
        prompt = PROMPTS[index % 2]
        tokens = torch.tensor([[*prompt, *completion.token_ids]], device="cuda")
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1] / (0.7 if index == 5 else 1.0)
        expected = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].cpu()
        found.append((torch.as_tensor(completion.logprobs) - expected).abs())
    return torch.cat(found)


def test_responses_are_as_near_to_float32_as_those_of_vllms_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM sends functions to its worker.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    completions, (num_joined, captured) = sampled(folder)
    others, parts = sampled(folder, additional_config={})
    num_layers = AutoConfig.from_pretrained(folder).num_hidden_layers
    assert (num_joined, captured) == (num_layers, True) and parts == (0, False), "each engine has its own parts"
    ours, theirs = gaps(folder, completions), gaps(folder, others)
    # Logits are bfloat16 in both: at 2 to 4 they are 2 ** -6 apart, those of a model with biases are larger.
    assert theirs.mean() < 0.1 and ours.mean() < 1.1 * theirs.mean(), f"{ours.mean()} and {theirs.mean()} nats"
    assert ours.max() < 2 * theirs.max(), f"{ours.max()} and {theirs.max()} nats"
