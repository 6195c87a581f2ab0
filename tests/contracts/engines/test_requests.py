"""What becomes of requests: filters, stops, limits, scores, aborts. Each engine is compared with transformers."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlframe.types.input import ModelInput
from rlframe.types.rollout import FinishReason, GenerationRequest, SamplingParams, Span
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from tests.contracts.engines.kinds import KINDS
from tests.contracts.engines.trainer import CLOSE, STOP_TOKENS, Case, nats, run, transformers_model, verify
from tests.rollout_models import make_requests

LONG = SamplingParams(max_tokens=400, min_tokens=400)


def test_a_mixed_batch_has_logprobs_by_one_rule(case: Case):
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.6},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 5},
        {"temperature": 1.0, "top_k": 3},
    ]
    requests = [
        request
        for each in settings
        for request in make_requests(2, sampling=SamplingParams(max_tokens=10, min_tokens=10, **each))
    ]
    model = transformers_model(case.folder, case.weights)
    for request, completion in zip(requests, case.engine.generate(requests), strict=True):
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
        assert completion.spans == [Span(version=0, start=0, end=10)]
        assert completion.finish_reason is FinishReason.LENGTH


def test_filters_decide_what_is_sampled(case: Case):
    """top_k=1 and a tiny top_p leave the likeliest token; the model's own defaults, which have a top_k, do nothing."""
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}]
    [(likeliest,), (first,), (first_mass,)] = [
        {tuple(each.token_ids.tolist()) for each in case.engine.generate(requests)}
        for requests in (
            make_requests(1, sampling=SamplingParams(max_tokens=8, min_tokens=8, **each)) for each in settings
        )
    ]
    assert likeliest == first == first_mass
    free = make_requests(1, group_size=64, sampling=SamplingParams(max_tokens=1, min_tokens=1))
    assert len({each.token_ids[0].tolist() for each in case.engine.generate(free)}) > 10


def test_responses_are_those_of_the_embedded_engine(case: Case):
    """Every way to stop, and every filter where the sampler is ours: one that has its own is compared where it is
    greedy. The model's own defaults, which have a top_k, do nothing in either."""
    other = KINDS["transformers"].start(case.folder)
    verify(other, 0)
    assert case.engine.stop_tokens == other.stop_tokens == STOP_TOKENS
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 30},
        {"max_tokens": 30},
        {"temperature": 0.7, "top_p": 0.8, "max_tokens": 20},
        {"temperature": 1.3, "top_k": 4, "max_tokens": 20},
        {"temperature": 0.9, "top_p": 0.7, "top_k": 9, "max_tokens": 20, "min_tokens": 9},
        {"temperature": 0.0, "max_tokens": 30, "min_tokens": 6},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0.0, "max_tokens": 30, "stop": ("w2",)},
        {"temperature": 0.0, "max_tokens": 30, "min_tokens": 4, "stop": ("w4", "w5 w")},
        {"max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 1},
    ]
    if not case.kind.same_samples:
        settings = [each for each in settings if each.get("temperature") == 0.0]
    asked = [make_requests(10, sampling=SamplingParams(**one), longest=8) for one in settings]
    mine = case.engine.generate(list(itertools.chain(*asked)))
    theirs = list(itertools.chain(*map(other.generate, asked)))
    for one, another in zip(mine, theirs, strict=True):
        assert one.token_ids.tolist() == another.token_ids.tolist()
        assert one.finish_reason is another.finish_reason
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(another.logprobs), **CLOSE)
    assert {each.finish_reason for each in mine} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({len(each.token_ids.tolist()) for each in mine}) > 8


def test_many_calls_at_once_answer_as_one_call_does(case: Case):
    requests = make_requests(12, sampling=SamplingParams(max_tokens=12))
    together = case.engine.generate(requests)
    with ThreadPoolExecutor(max_workers=min(case.engine.max_calls, len(requests))) as pool:
        apart = list(pool.map(lambda request: case.engine.generate([request])[0], requests))
    for one, other in zip(together, apart, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.finish_reason is other.finish_reason


def test_a_sequence_may_have_every_position_of_the_model_and_no_more(case: Case):
    prompt = tuple(5 + index % 60 for index in range(1000))
    full = SamplingParams(max_tokens=24, min_tokens=24)
    (completion,) = case.engine.generate([GenerationRequest(input=ModelInput(prompt), sampling=full, seed=0)])
    assert len(completion.token_ids.tolist()) == 24
    expected = nats(
        transformers_model(case.folder, case.weights),
        GenerationRequest(input=ModelInput(prompt), sampling=full, seed=0),
        completion.token_ids.tolist(),
    )
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        case.engine.generate([GenerationRequest(input=ModelInput(()), sampling=LONG, seed=0)])
    with pytest.raises(ValueError, match="625 tokens and a response of 400 exceed the 1024 positions"):
        case.engine.generate([GenerationRequest(input=ModelInput((5,) * 625), sampling=LONG, seed=0)])


def test_scores_are_those_of_transformers_at_temperature_1(case: Case):
    # 66 is the last of the vocabulary, which SGLang takes for another in its answers.
    sequences = [request.input for request in make_requests(5, sampling=LONG)]
    sequences += [ModelInput((7,)), ModelInput((66, 66, 5, 66))]
    model = transformers_model(case.folder, case.weights)
    for sequence, scores in zip(sequences, case.engine.score(sequences), strict=True):
        request = GenerationRequest(input=ModelInput(sequence.token_ids[:1]), sampling=SamplingParams(), seed=0)
        expected = nats(model, request, sequence.token_ids[1:].tolist()) if len(sequence) > 1 else torch.zeros(0)
        torch.testing.assert_close(torch.tensor(scores), expected, **CLOSE)


def test_abort_returns_what_there_is(case: Case):
    requests = make_requests(3, sampling=LONG)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 5)
    case.engine.abort()
    model = transformers_model(case.folder, case.weights)
    for request, completion in zip(requests, running.result(timeout=60), strict=True):
        assert completion.finish_reason is FinishReason.ABORT
        assert 5 <= len(completion.token_ids.tolist()) < 400
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    # Nothing of it is left: the same requests run to their end.
    short = [replace(request, sampling=SamplingParams(max_tokens=4, min_tokens=4)) for request in requests]
    assert {each.finish_reason for each in case.engine.generate(short)} == {FinishReason.LENGTH}


def test_an_abort_while_paused_returns_what_there_is(case: Case):
    requests = make_requests(2, sampling=LONG)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 5)
    case.engine.pause()
    case.engine.abort()
    for completion in running.result(timeout=60):
        assert completion.finish_reason is FinishReason.ABORT
        assert 5 <= len(completion.token_ids.tolist()) == len(completion.logprobs) < 400
    case.engine.resume()


@pytest.mark.usefixtures("served")
def test_a_sequence_to_score_leaves_room_for_the_token_that_the_engine_samples(case: Case):
    with pytest.raises(ValueError, match="sequences of 1 to 1023 tokens"):
        case.engine.score([ModelInput((5,) * 1024)])


@pytest.mark.usefixtures("served")
def test_errors_of_a_rank_arrive_as_what_they_are(case: Case):
    with pytest.raises(WeightSyncFailed, match=f"connect on rank 0 of {case.kind.title}: AttributeError.*'transport'"):
        case.engine.on_ranks([RankCall.of(DestinationRank.connect, "not a link")])
    assert case.engine.is_alive()
