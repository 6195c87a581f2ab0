"""Draws of vLLM's model runner V1 by one kernel: their distribution, and that a seed decides a response."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.decode import runner
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import GenerationRequest, SamplingParams
from tests.contracts.engines.trainer import verify
from tests.rollout_models import make_with_tokenizer

pytestmark = pytest.mark.gpu
ROWS, VOCABULARY = 20_000, 9_000


def test_draws_follow_the_softmax() -> None:
    from rlframe.rollout.vllm.sampling.gumbel import draw

    device = torch.device("cuda")
    logits = torch.randn(VOCABULARY, device=device, generator=torch.Generator(device).manual_seed(0))
    logits[::7] = -torch.inf
    seeds = torch.full((ROWS,), 2**62 + 5, device=device)
    tokens = draw(logits.expand(ROWS, -1).contiguous(), seeds, torch.arange(ROWS, device=device))
    assert not (tokens % 7 == 0).any()
    # Tokens in the order of their numbers, in 50 parts of like probability.
    probabilities = logits.double().softmax(0)
    parts = (probabilities.cumsum(0) * 50).long().clamp(max=49)
    expected = ROWS * torch.zeros_like(probabilities[:50]).index_add(0, parts, probabilities)
    counts = torch.bincount(parts[tokens], minlength=50)
    # Chi-square with 49 degrees of freedom: above 86 once in a thousand seeds.
    assert float(((counts - expected) ** 2 / expected).sum()) < 86
    # Alone as in company.
    assert torch.equal(draw(logits[None], seeds[:1], torch.tensor([77], device=device)), tokens[77:78])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    folder = make_with_tokenizer(
        "qwen3_tied", tmp_path_factory.mktemp("model"), head_dim=64, max_position_embeddings=256
    )
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    config = VllmConfig(kv_cache_gb=1.0, max_num_seqs=16, max_model_len=256, compile=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "CHOSEN_RUNNER", "0")
        patch.setenv(runner.RUNNER, "0")
        running = VllmEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda")
    verify(running, 0)
    yield running
    running.close()


def requests(count: int, *, seed: int, temperature: float = 1.0, top_p: float = 1.0) -> list[GenerationRequest]:
    """As many requests for 40 tokens."""
    sampling = SamplingParams(max_tokens=40, min_tokens=40, temperature=temperature, top_p=top_p)
    prompts = [ModelInput(tuple(3 + (7 * place + number) % 60 for place in range(9))) for number in range(count)]
    return [
        GenerationRequest(input=prompt, sampling=sampling, seed=seed + number) for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_seed_decides_a_response(engine: VllmEngine, top_p: float) -> None:
    first, again, other = (engine.generate(requests(12, seed=seed, top_p=top_p)) for seed in (1, 1, 100))
    assert [one.token_ids.tolist() for one in first] == [one.token_ids.tolist() for one in again]
    assert all(one.token_ids.tolist() != two.token_ids.tolist() for one, two in zip(first, other, strict=True))


def test_a_continued_response_goes_on_as_it_would_have(engine: VllmEngine) -> None:
    asked = requests(8, seed=3)
    whole = engine.generate(asked)
    rest = engine.generate(
        [
            replace(request, input=request.input.then(one.token_ids[:15].tolist()), first_position=15)
            for request, one in zip(asked, whole, strict=True)
        ]
    )
    # The next token is drawn by the same number; a prefill rounds other logits than decoding did.
    same = sum(one.token_ids[15] == two.token_ids[0] for one, two in zip(whole, rest, strict=True))
    assert same >= 7


def test_greedy_requests_beside_others_take_the_likeliest_token(engine: VllmEngine) -> None:
    greedy = requests(4, seed=9, temperature=0.0)
    alone = engine.generate(greedy)
    mixed = engine.generate([*greedy, *requests(8, seed=20)])[:4]
    assert [one.token_ids[0] for one in alone] == [one.token_ids[0] for one in mixed]
