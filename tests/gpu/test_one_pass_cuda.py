"""Tokens and logprobs by one pass over the logits: their distribution and their rounding, and whole responses of an
engine of model runner V2."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import GenerationRequest, SamplingParams
from tests.contracts.engines.trainer import verify
from tests.rollout_models import make_with_tokenizer

pytestmark = pytest.mark.gpu
ROWS, VOCABULARY = 20_000, 9_000


def test_draws_follow_the_softmax() -> None:
    from rlframe.rollout.vllm.sampling.one_pass import draw

    device = torch.device("cuda")
    logits = torch.randn(VOCABULARY, device=device, generator=torch.Generator(device).manual_seed(0))
    logits = logits.bfloat16()
    values = {"seeds": torch.tensor([2**62 + 5], device=device), "temperatures": torch.tensor([0.8], device=device)}
    slots, lengths = torch.zeros(ROWS, dtype=torch.int32, device=device), torch.arange(1, ROWS + 1, device=device)
    tokens, logprobs = draw(logits.expand(ROWS, -1).contiguous(), slots, lengths, **values)
    exact = (logits.double() / 0.8).log_softmax(0)
    torch.testing.assert_close(logprobs.double(), exact[tokens], atol=5e-6, rtol=0)
    # Tokens in the order of their numbers, in 50 parts of like probability.
    probabilities = exact.exp()
    parts = (probabilities.cumsum(0) * 50).long().clamp(max=49)
    expected = ROWS * torch.zeros_like(probabilities[:50]).index_add(0, parts, probabilities)
    counts = torch.bincount(parts[tokens], minlength=50)
    # Chi-square with 49 degrees of freedom: above 86 once in a thousand seeds.
    assert float(((counts - expected) ** 2 / expected).sum()) < 86
    # Alone as in company.
    alone = draw(logits[None], slots[:1], lengths[77:78], **values)
    assert torch.equal(alone[0], tokens[77:78]) and torch.equal(alone[1], logprobs[77:78])


@pytest.fixture(
    scope="module",
    params=[("qwen3_tied", False), ("qwen3_tied", True), ("qwen3_moe", True)],
    ids=["one_process", "worker_process", "mixture"],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    name, own_process = request.param
    folder = make_with_tokenizer(name, tmp_path_factory.mktemp("model"), head_dim=64, max_position_embeddings=256)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    sizes = {"kv_cache_gb": 1.0, "max_num_seqs": 16, "max_model_len": 256, "worker_process": own_process}
    running = VllmEngine(VllmConfig(compile=False, **sizes), folder=folder, dtype=torch.bfloat16, device="cuda")
    assert running._engine.vllm_config.use_v2_model_runner
    verify(running, 0)
    yield running
    running.close()


def requests(count: int, *, seed: int, length: int = 60, **sampling: float) -> list[GenerationRequest]:
    """As many requests, each with tokens that are forbidden at first and may end it later."""
    parameters = SamplingParams(max_tokens=length, min_tokens=20, **sampling)
    prompts = [ModelInput(tuple(3 + (7 * place + number) % 60 for place in range(9))) for number in range(count)]
    return [
        GenerationRequest(input=prompt, sampling=parameters, seed=seed + number)
        for number, prompt in enumerate(prompts)
    ]


def test_a_seed_decides_a_response_in_any_company(engine: VllmEngine) -> None:
    asked = requests(12, seed=1, temperature=0.9)
    first = engine.generate(asked)
    # With requests that leave the one pass to vLLM for the whole batch, in another order.
    mixed = engine.generate([*requests(3, seed=50, top_p=0.9), *asked[::-1]])[3:][::-1]
    # The first tokens, before other roundings of other batches part them.
    assert [one.token_ids[:1].tolist() for one in first] == [one.token_ids[:1].tolist() for one in mixed]
    same = sum(one.token_ids.tolist() == two.token_ids.tolist() for one, two in zip(first, mixed, strict=True))
    assert same >= 9, f"{same} of 12 responses are the same"
    assert all(len(one.token_ids) >= 20 for one in first), "stops are forbidden at first"


def test_a_continued_response_goes_on_as_it_would_have(engine: VllmEngine) -> None:
    asked = requests(8, seed=3)
    whole = engine.generate(asked)
    rest = engine.generate(
        [
            replace(request, input=request.input.then(one.token_ids[:15].tolist()), first_position=15)
            for request, one in zip(asked, whole, strict=True)
        ]
    )
    same = sum(one.token_ids[15] == two.token_ids[0] for one, two in zip(whole, rest, strict=True))
    assert same >= 7


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_score(engine: VllmEngine, temperature: float) -> None:
    asked = requests(12, seed=9, temperature=temperature)
    found = engine.generate(asked)
    if temperature == 1.0:
        scores = engine.score([each.input.then(one.token_ids.tolist()) for each, one in zip(asked, found, strict=True)])
        gaps = torch.cat(
            [
                torch.as_tensor(one.logprobs) - torch.tensor(score[-len(one.token_ids) :])
                for one, score in zip(found, scores, strict=True)
            ]
        )
        assert float(gaps.abs().mean()) < 0.01
    vllms = engine._fetcher
    engine._fetcher = None
    try:
        theirs = engine.generate(asked)
    finally:
        engine._fetcher = vllms
    pairs = [
        pair for pair in zip(found, theirs, strict=True) if pair[0].token_ids.tolist() == pair[1].token_ids.tolist()
    ]
    assert len(pairs) >= 9, "vLLM's own logprobs come with the same draws"
    for one, two in pairs:
        torch.testing.assert_close(torch.as_tensor(one.logprobs), torch.as_tensor(two.logprobs), atol=0.02, rtol=0)
