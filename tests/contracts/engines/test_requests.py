"""What becomes of requests: filters, stops, limits, scores, aborts. Each engine is compared with transformers."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.rollout.base.config import CacheAfterSync
from rlframe.types.input import ModelInput
from rlframe.types.rollout import FinishReason, GenerationRequest, SamplingParams, Span
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from tests.contracts.engines.kinds import KINDS
from tests.contracts.engines.trainer import CLOSE, STOP_TOKENS, Case, nats, run, transformers_model, verify
from tests.rollout_models import make_requests

pytestmark = pytest.mark.later

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


def named(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """The requests under the names a, b, c, ..."""
    return [replace(each, name=name) for each, name in zip(requests, "abcdefgh", strict=False)]


def continued(request: GenerationRequest, tokens: list[int]) -> GenerationRequest:
    """What is left to do when `tokens` have been sampled."""
    return replace(request, input=request.input.then(tokens), first_position=len(tokens))


def test_an_abort_by_name_ends_that_request_and_no_other(case: Case):
    requests = named(make_requests(3, sampling=LONG))
    alone = case.engine.generate(requests)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 5)
    case.engine.abort({"b", "never heard of", ""})
    first, aborted, last = running.result(timeout=60)
    assert aborted.finish_reason is FinishReason.ABORT
    assert 5 <= len(aborted.token_ids) == len(aborted.logprobs) < 400
    assert aborted.token_ids.tolist() == alone[1].token_ids[: len(aborted.token_ids)].tolist()
    for one, other in ((first, alone[0]), (last, alone[2])):
        assert one.finish_reason is FinishReason.LENGTH
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), **CLOSE)
    # The names are forgotten with their requests.
    case.engine.abort(["a", "b"])
    assert case.engine.generate(requests[1:2])[0].token_ids.tolist() == alone[1].token_ids.tolist()


def test_an_abort_by_name_returns_before_the_other_requests_of_its_call_end(case: Case):
    requests = named(make_requests(2, sampling=replace(LONG, max_tokens=900, min_tokens=900)))
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 5)
    case.engine.abort({"a"})
    assert not running.done()
    case.engine.abort()
    first, second = running.result(timeout=60)
    assert first.finish_reason is second.finish_reason is FinishReason.ABORT
    # The first may be a token ahead: its prompt can be computed a step before the other's.
    assert max(len(first.token_ids), len(second.token_ids)) < 900


def test_running_requests_have_names_of_their_own(case: Case):
    request = named(make_requests(1, sampling=LONG))[0]
    with pytest.raises(ValueError, match="unique among running requests, got 'a' twice"):
        case.engine.generate([request, replace(request, seed=1)])
    if case.engine.max_calls > 1:
        running = run(lambda: case.engine.generate([request]))
        case.kind.wait_for_tokens(case.engine, 1)
        with pytest.raises(ValueError, match="unique among running requests, got 'a' twice"):
            case.engine.generate([request])
        assert running.result(timeout=60)[0].finish_reason is FinishReason.LENGTH


def test_a_continued_response_is_the_one_that_is_not_interrupted(case: Case):
    """Tokens, logprobs, routes and end, wherever it was cut, also where stop tokens are not yet allowed."""
    settings: list[dict[str, Any]] = [
        {"max_tokens": 40, "min_tokens": 12},
        {"max_tokens": 40, "min_tokens": 12, "temperature": 0.0},
        {"max_tokens": 40, "min_tokens": 40, "temperature": 0.8, "top_p": 0.9},
        {"max_tokens": 40, "min_tokens": 3, "temperature": 1.2, "top_k": 9},
    ]
    requests = [each for one in settings for each in make_requests(6, sampling=SamplingParams(**one))]
    wholes = case.engine.generate(requests)
    pairs = [
        (whole, continued(request, whole.token_ids[:count].tolist()))
        for request, whole in zip(requests, wholes, strict=True)
        for count in (1, 7, len(whole.token_ids) - 1)
        if 0 < count < len(whole.token_ids)
    ]
    assert len(pairs) > 50
    for (whole, request), rest in zip(pairs, case.engine.generate([each for _, each in pairs]), strict=True):
        first = request.first_position
        assert rest.token_ids.tolist() == whole.token_ids[first:].tolist()
        assert rest.finish_reason is whole.finish_reason
        torch.testing.assert_close(torch.tensor(rest.logprobs), torch.tensor(whole.logprobs[first:]), **CLOSE)
        assert rest.spans == [Span(version=0, start=0, end=len(whole.token_ids) - first)]
        if whole.routes is not None:
            assert rest.routes is not None
            assert np.array_equal(np.sort(rest.routes, -1), np.sort(whole.routes, -1))


def test_what_an_abort_returns_can_be_continued(case: Case):
    requests = named(make_requests(3, sampling=LONG))
    wholes = case.engine.generate(requests)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 5)
    case.engine.abort()
    parts = running.result(timeout=60)
    rests = case.engine.generate(
        [continued(request, part.token_ids.tolist()) for request, part in zip(requests, parts, strict=True)]
    )
    for whole, part, rest in zip(wholes, parts, rests, strict=True):
        assert 5 <= len(part.token_ids) < 400
        assert whole.token_ids.tolist() == [*part.token_ids.tolist(), *rest.token_ids.tolist()]
        logprobs = torch.tensor([*part.logprobs, *rest.logprobs])
        torch.testing.assert_close(logprobs, torch.tensor(whole.logprobs), **CLOSE)


def test_a_stop_string_across_the_seam_ends_a_continued_response(case: Case):
    free = SamplingParams(max_tokens=30)
    requests = make_requests(12, sampling=free)
    request, whole = next(
        pair for pair in zip(requests, case.engine.generate(requests), strict=True) if len(pair[1].token_ids) > 12
    )
    tokens = whole.token_ids.tolist()
    stop = case.engine.tokenizer.decode(tokens[9:11])
    with_stop = replace(request, sampling=replace(free, stop=(stop,)))
    (stopped,) = case.engine.generate([with_stop])
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == (tokens[:11], FinishReason.STOP)
    for count in (4, 10):
        (rest,) = case.engine.generate([continued(with_stop, tokens[:count])])
        assert (rest.token_ids.tolist(), rest.finish_reason) == (tokens[count:11], FinishReason.STOP)
    # Not before min_tokens, of which the first part is some.
    late = replace(with_stop, sampling=replace(with_stop.sampling, min_tokens=12))
    (rest,) = case.engine.generate([continued(late, tokens[:10])])
    assert len(rest.token_ids) > 1


@pytest.mark.parametrize("cache", CacheAfterSync)
def test_an_abort_while_paused_returns_what_there_is(
    case: Case, cache: CacheAfterSync, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(case.engine.config, "cache_after_sync", cache)
    requests = make_requests(2, sampling=LONG)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 5)
    case.engine.pause()
    case.engine.abort()
    for completion in running.result(timeout=60):
        assert completion.finish_reason is FinishReason.ABORT
        assert 5 <= len(completion.token_ids.tolist()) == len(completion.logprobs) < 400
    case.engine.resume()


@pytest.mark.parametrize("cache", CacheAfterSync)
def test_an_abort_by_name_while_paused_leaves_the_others(
    case: Case, cache: CacheAfterSync, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(case.engine.config, "cache_after_sync", cache)
    requests = named(make_requests(3, sampling=replace(LONG, temperature=0.0)))
    alone = case.engine.generate(requests)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 5)
    case.engine.pause()
    case.engine.abort({"c"})
    case.engine.resume()
    *others, aborted = running.result(timeout=60)
    assert aborted.finish_reason is FinishReason.ABORT and 5 <= len(aborted.token_ids) < 400
    for one, other in zip(others, alone, strict=False):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.finish_reason is FinishReason.LENGTH


@pytest.mark.usefixtures("served")
def test_a_sequence_to_score_leaves_room_for_the_token_that_the_engine_samples(case: Case):
    with pytest.raises(ValueError, match="sequences of 1 to 1023 tokens"):
        case.engine.score([ModelInput((5,) * 1024)])


@pytest.mark.usefixtures("served")
def test_errors_of_a_rank_arrive_as_what_they_are(case: Case):
    with pytest.raises(WeightSyncFailed, match=f"connect on rank 0 of {case.kind.title}: AttributeError.*'transport'"):
        case.engine.on_ranks([RankCall.of(DestinationRank.connect, "not a link")])
    assert case.engine.is_alive()
