"""Decode steps of vLLM that read shared tokens once: the kernels in bfloat16, and responses with them and without."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

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
PAGE, SIZE, HEADS = 16, 128, 2


@pytest.mark.parametrize("group", [1, 2, 5, 8, 16, 32])
@pytest.mark.parametrize(("prompts", "shared_pages", "responses"), [(3, 200, 8), (16, 10, 8), (1, 30, 40), (7, 0, 1)])
def test_kernels(group: int, prompts: int, shared_pages: int, responses: int) -> None:
    from rlframe.rollout.vllm.attention.kernels import attend
    from rlframe.rollout.vllm.attention.plan import Plan

    device, rows, own = torch.device("cuda"), prompts * responses, 20
    generator = torch.Generator(device=device).manual_seed(0)
    pages = torch.randperm(prompts * shared_pages + rows * own, device=device, generator=generator).int()
    shared, alone = pages.split([prompts * shared_pages, rows * own])
    tables = torch.cat([shared.view(prompts, -1).repeat(responses, 1), alone.view(rows, own)], 1)
    lengths = shared_pages * PAGE + torch.randint(1, own * PAGE, (rows,), device=device, generator=generator).int()
    cache = torch.randn(len(pages), PAGE, HEADS, 2 * SIZE, device=device, generator=generator).bfloat16()
    k, v = cache.split(SIZE, dim=-1)
    q = torch.randn(rows, HEADS * group, SIZE, device=device, generator=generator).bfloat16()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    sizes = {"page": PAGE, "heads": HEADS, "query_heads": HEADS * group, "width": SIZE}
    plan, out = Plan.of(max_rows=rows + 3, processors=processors, device=device, **sizes), torch.empty_like(q)
    plan.fill(tables, lengths)
    attend(plan, q, k, v, tables, scale=SIZE**-0.5, out=out)
    for row in range(rows):
        keys, values = (part[tables[row].long()].flatten(0, 1)[: lengths[row]].float() for part in (k, v))
        queries = q[row].float().view(HEADS, group, SIZE)
        shares = torch.softmax(torch.einsum("hgd,thd->hgt", queries, keys) * SIZE**-0.5, -1)
        expected = torch.einsum("hgt,thd->hgd", shares, values).flatten(0, 1)
        torch.testing.assert_close(out[row].float(), expected, atol=4e-3, rtol=2e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"head_dim": SIZE, "max_position_embeddings": 1024}
    folder = make_with_tokenizer("qwen3_tied", tmp_path_factory.mktemp("model"), **sizes)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


PROMPTS = [tuple(3 + (7 * place + 11 * number) % 60 for place in range(83)) for number in range(2)]
"""Of five pages each."""


def sampled(folder: Path, *, share: bool) -> list[Completion]:
    """12 responses to each prompt, in turns, from an engine of its own."""
    config = VllmConfig(kv_cache_gb=1.0, max_num_seqs=16, max_model_len=256, compile=False, share_prompts=share)
    engine = VllmEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda")
    try:
        verify(engine, 0)
        sampling = SamplingParams(max_tokens=100, min_tokens=100)
        inputs = [ModelInput(prompt) for prompt in PROMPTS]
        requests = [GenerationRequest(input=inputs[index % 2], sampling=sampling, seed=index) for index in range(24)]
        return engine.generate(requests)
    finally:
        engine.close()


def gaps(folder: Path, completions: list[Completion]) -> torch.Tensor:
    """[24, 100] how far the engine's logprob of each token is from transformers' in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    tokens = torch.tensor([completion.token_ids for completion in completions], device="cuda")
    prompts = torch.tensor([PROMPTS[index % 2] for index in range(len(completions))], device="cuda")
    with torch.no_grad():
        logits = model(torch.cat([prompts, tokens], 1)).logits[:, prompts.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).cpu()
    return (torch.stack([torch.as_tensor(completion.logprobs) for completion in completions]) - expected).abs()


def test_responses_are_as_near_to_float32_as_those_of_flash_attention(folder: Path) -> None:
    ours, theirs = (gaps(folder, sampled(folder, share=share)) for share in (True, False))
    # Logits are bfloat16 in both: at 2 to 4 they are 2 ** -6 apart.
    assert theirs.mean() < 0.03 and ours.mean() < 1.1 * theirs.mean(), f"{ours.mean()} and {theirs.mean()} nats"
    assert ours.max() < 2 * theirs.max(), f"{ours.max()} and {theirs.max()} nats"
