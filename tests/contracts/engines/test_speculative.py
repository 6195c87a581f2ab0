"""Speculative decoding changes no response: neither tokens, nor their logprobs, nor how often each is sampled."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlframe.rollout.base.speculative import SpeculativeConfig, SpeculativeMethod
from rlframe.rollout.served.engine import ServedEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, SamplingParams
from tests.contracts.engines.kinds import KINDS, param
from tests.contracts.engines.trainer import CLOSE, make, nats, perturbed, run, synced, transformers_model, verify
from tests.rollout_models import make_requests

pytestmark = pytest.mark.engine
REQUESTS = [
    *make_requests(4, sampling=SamplingParams(temperature=0.0, max_tokens=24)),
    *make_requests(4, sampling=SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, min_tokens=12)),
    *make_requests(4, sampling=SamplingParams(temperature=1.0, top_k=20, max_tokens=40)),
]
NUM_SAMPLES = 3000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[param("vllm")])
def drafting(model: Path) -> Iterator[ServedEngine]:
    """An engine whose drafts are the policy's own likeliest tokens."""
    engine = KINDS["vllm"].start(model, speculative=of_draft_model(model))
    assert isinstance(engine, ServedEngine)
    verify(engine, 0)
    yield engine
    engine.close()


def of_draft_model(folder: Path) -> SpeculativeConfig:
    return SpeculativeConfig(method=SpeculativeMethod.DRAFT_MODEL, model=str(folder), num_tokens=3)


def test_greedy_tokens_and_all_logprobs_are_the_models(drafting: ServedEngine, model: Path):
    before = drafting.drafts()
    completions = drafting.generate(REQUESTS)
    policy = transformers_model(model, load_file(model / "model.safetensors"))
    for request, completion in zip(REQUESTS, completions, strict=True):
        tokens = completion.token_ids.tolist()
        if request.sampling.temperature == 0:
            likeliest = policy(torch.tensor([request.input.token_ids.tolist() + tokens])).logits[0].argmax(-1)
            assert tokens == likeliest[len(request.input) - 1 : -1].tolist()
        torch.testing.assert_close(torch.tensor(completion.logprobs), nats(policy, request, tokens), **CLOSE)
    made = drafting.drafts() - before
    assert 0 < made.num_accepted < made.num_tokens <= 3 * made.num_checks
    assert drafting.generate(REQUESTS)[-1].token_ids.tolist() == completions[-1].token_ids.tolist()


def test_tokens_behind_a_draft_have_the_models_distribution(drafting: ServedEngine, model: Path):
    """Chi-square of the second token, which is checked against a draft, with the exact distribution of the model. Its
    mean is the number of degrees of freedom d, and its standard deviation sqrt(2 d); seeds are fixed."""
    prompt, sampling = (5, 9, 14, 5, 9), SamplingParams(temperature=0.7, max_tokens=2, min_tokens=2)
    requests = [
        GenerationRequest(input=ModelInput(np.array(prompt)), sampling=sampling, seed=seed)
        for seed in range(NUM_SAMPLES)
    ]
    before = drafting.drafts()
    seconds = torch.tensor([int(each.token_ids[1]) for each in drafting.generate(requests)])
    assert (drafting.drafts() - before).num_checks >= NUM_SAMPLES / 2
    policy = transformers_model(model, load_file(model / "model.safetensors"))
    require_frequencies(seconds, second_token(policy, prompt, temperature=0.7, stops=drafting.stop_tokens))


def require_frequencies(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Compares how often each token came with its probability."""
    expected = len(tokens) * probabilities
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    rare = expected < 5
    counts, expected = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (counts, expected))
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    assert freedom >= 10
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def second_token(policy: Any, prompt: tuple[int, ...], *, temperature: float, stops: list[int]) -> torch.Tensor:
    """[V] probabilities of the second token of a response of transformers' model, in which no stop token may come."""

    @torch.no_grad()
    def probabilities(rows: torch.Tensor) -> torch.Tensor:
        logits = policy(rows).logits[:, -1].double() / temperature
        logits[:, stops] = -torch.inf
        return logits.softmax(dim=-1)

    first = probabilities(torch.tensor([prompt]))[0]
    after = torch.stack([torch.tensor([*prompt, token]) for token in range(len(first))])
    return first @ probabilities(after)


def test_an_aborted_response_that_is_continued_has_the_tokens_of_the_whole(drafting: ServedEngine):
    whole = drafting.generate(REQUESTS)
    for request, completion in zip(REQUESTS[4:], whole[4:], strict=True):
        begun = completion.token_ids.tolist()[: len(completion.token_ids) // 2]
        rest = drafting.generate(
            [
                GenerationRequest(
                    input=ModelInput(np.array([*request.input.token_ids.tolist(), *begun])),
                    sampling=request.sampling,
                    seed=request.seed,
                    first_position=len(begun),
                )
            ]
        )
        assert begun + rest[0].token_ids.tolist() == completion.token_ids.tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [param("vllm")])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_every_token_is_that_of_plain_decoding_also_after_a_sync(kind: object, method: str, model: Path):  # noqa: ARG001
    if method == "ngram" and importlib.util.find_spec("numba") is None:
        pytest.skip("vLLM finds n-grams with numba")
    found: list[list[Completion]] = []
    own = SpeculativeConfig(min_match_tokens=1) if method == "ngram" else of_draft_model(model)
    for speculative in (None, own):
        engine = KINDS["vllm"].start(model, speculative=speculative)
        weights = load_file(model / "model.safetensors")
        trainer, _, sync = synced(engine, weights)
        before = engine.generate(REQUESTS)
        trainer.train(perturbed(weights, seed=5))
        sync.publish(version=1)
        found.append([*before, *engine.generate(REQUESTS)])
        assert (engine.drafts().num_accepted > 0) == (speculative is not None)
        engine.close()
    for plain, drafted in zip(*found, strict=True):
        assert drafted.token_ids.tolist() == plain.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(drafted.logprobs), torch.tensor(plain.logprobs), **CLOSE)


@pytest.mark.thorough
def test_a_pause_and_an_abort_leave_logprobs_right(drafting: ServedEngine, model: Path):
    requests = make_requests(6, sampling=SamplingParams(temperature=0.8, max_tokens=100, min_tokens=100))
    answer = run(lambda: drafting.generate(requests))
    KINDS["vllm"].wait_for_tokens(drafting, 3, every=False)
    drafting.pause()
    drafting.resume()
    drafting.abort()
    policy = transformers_model(model, load_file(model / "model.safetensors"))
    for request, completion in zip(requests, answer.result(), strict=True):
        tokens = completion.token_ids.tolist()
        assert completion.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        torch.testing.assert_close(torch.tensor(completion.logprobs), nats(policy, request, tokens), **CLOSE)
