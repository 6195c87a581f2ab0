"""The embedded engine while it decodes: pause, new weights, resume, abort. The other thread acts at a known token."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlframe.rollout.base.config import CacheAfterSync
from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, SamplingParams, Span
from rlframe.utils.errors import WeightSyncFailed
from tests.rollout_models import make_requests, make_with_tokenizer
from tests.until import PATIENCE_S, until

FORCED = SamplingParams(max_tokens=9, min_tokens=9)
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


def start(folder: Path, *, seed: int | None = None, **settings: int) -> TransformersEngine:
    """An engine at version 0."""
    config = TransformersConfig(**settings)
    engine = TransformersEngine(config, folder=folder, dtype=torch.float32, device="cpu", random_seed=seed)
    engine.gate.commit(0)
    return engine


def while_decoding(
    engine: TransformersEngine, requests: list[GenerationRequest], *, forward: int, act: Callable[[], None]
) -> list[Completion] | Exception:
    """What `generate` returned or raised, when `act` ran in another thread during forward pass number `forward`.

    The pass goes on once `act` has got as far as it can before the decode loop takes notice.
    """
    original, seen = engine.model.forward, []
    acting = threading.Thread(target=act)

    def watched(*arguments: object, **named: object) -> object:
        seen.append(1)
        if len(seen) == forward:
            acting.start()
            until(lambda: engine._control.wanted or not acting.is_alive(), every_s=0.0)
        return original(*arguments, **named)

    engine.model.forward = watched
    try:
        return engine.generate(requests)
    except WeightSyncFailed as error:
        return error
    finally:
        engine.model.forward = original
        acting.join(PATIENCE_S)
        assert not acting.is_alive()


def test_a_pause_without_new_weights_changes_no_token(folder: Path) -> None:
    engine, requests = start(folder), make_requests(6, group_size=2, sampling=FORCED)
    expected = engine.generate(requests)

    def pause() -> None:
        engine.pause()
        assert not engine._control._computing
        engine.resume()

    assert while_decoding(engine, requests, forward=5, act=pause) == expected


def test_running_requests_go_on_with_the_new_weights_and_a_prefix_computed_anew(folder: Path) -> None:
    engine, other = start(folder), start(folder, seed=5)
    # Two rows at a time of three: the last request starts after the sync.
    engine.config = replace(engine.config, max_batch=2)
    requests = make_requests(3, sampling=GREEDY)

    def sync() -> None:
        engine.gate.begin(1)
        engine.pause()
        for mine, new in zip(engine.model.parameters(), other.model.parameters(), strict=True):
            mine.copy_(new)
        engine.resume()
        engine.gate.commit(1)

    # Pass 1 is the prefill, so that pass 5 gives the 4th token.
    completions = while_decoding(engine, requests, forward=5, act=sync)
    assert isinstance(completions, list)
    longest = sorted(range(3), key=lambda index: -len(requests[index].input))
    for index in longest[:2]:
        assert completions[index].spans == [
            Span(version=0, start=0, end=4), Span(version=1, start=4, end=9)
        ]  # fmt: skip
        assert completions[index].versions[-1] == 1
    assert completions[longest[2]].spans == [Span(version=1, start=0, end=9)]
    before = start(folder)
    for request, completion in zip(requests, completions, strict=True):
        first = completion.spans[0].end if len(completion.spans) > 1 else 0
        (old,) = before.generate([request])
        assert completion.token_ids[:first].tolist() == old.token_ids[:first].tolist()
        # What follows is what the new weights say after prompt and first part: nothing of the old cache is left.
        rest = replace(GREEDY, max_tokens=9 - first, min_tokens=9 - first)
        text = (*request.input.token_ids.tolist(), *completion.token_ids[:first].tolist())
        (new,) = other.generate([GenerationRequest(input=ModelInput(text), sampling=rest, seed=0)])
        assert completion.token_ids[first:].tolist() == new.token_ids.tolist()
        assert completion.logprobs[first:] == pytest.approx(new.logprobs, abs=1e-5)


def test_an_abort_returns_what_is_there(folder: Path) -> None:
    engine = start(folder)
    engine.config = replace(engine.config, max_batch=2)
    requests = make_requests(3, sampling=FORCED)
    expected = engine.generate(requests)
    completions = while_decoding(engine, requests, forward=4, act=engine.abort)
    assert isinstance(completions, list)
    longest = sorted(range(3), key=lambda index: -len(requests[index].input))
    for index in longest[:2]:
        assert completions[index].token_ids.tolist() == expected[index].token_ids[:3].tolist()
        assert completions[index].logprobs == pytest.approx(expected[index].logprobs[:3], abs=1e-5)
        assert completions[index].finish_reason is FinishReason.ABORT
        assert completions[index].spans == [Span(version=0, start=0, end=3)]
    waiting = completions[longest[2]]
    assert (waiting.token_ids.tolist(), waiting.finish_reason) == ([], FinishReason.ABORT)
    assert waiting.spans == []
    # The next call is not concerned.
    assert engine.generate(requests) == expected


def test_an_abort_by_name_takes_a_row_out_of_the_batch_and_a_request_out_of_the_queue(folder: Path) -> None:
    engine = start(folder)
    engine.config = replace(engine.config, max_batch=2)
    requests = [replace(each, name=name) for each, name in zip(make_requests(4, sampling=FORCED), "abcd", strict=True)]
    expected = engine.generate(requests)
    longest = sorted(range(4), key=lambda index: -len(requests[index].input))
    first, second, third, fourth = longest
    names = {requests[first].name, requests[third].name, "another"}
    completions = while_decoding(engine, requests, forward=4, act=lambda: engine.abort(names))
    assert isinstance(completions, list)
    for index, count in ((first, 3), (third, 0)):
        assert completions[index].finish_reason is FinishReason.ABORT
        assert completions[index].token_ids.tolist() == expected[index].token_ids[:count].tolist()
    for index in (second, fourth):
        assert completions[index].finish_reason is FinishReason.LENGTH
        assert completions[index].token_ids.tolist() == expected[index].token_ids.tolist()
        assert completions[index].logprobs == pytest.approx(expected[index].logprobs, abs=1e-5)
    # The names are free again.
    assert engine.generate(requests) == expected


def test_an_abort_by_name_while_paused_acts_when_the_call_goes_on(folder: Path) -> None:
    engine = start(folder)
    requests = [replace(each, name=name) for each, name in zip(make_requests(2, sampling=FORCED), "ab", strict=True)]

    def pause_and_abort() -> None:
        engine.pause()
        engine.abort(["a"])
        engine.resume()

    completions = while_decoding(engine, requests, forward=4, act=pause_and_abort)
    assert isinstance(completions, list)
    assert [len(each.token_ids) for each in completions] == [3, 9]


def test_an_abort_by_name_does_not_wait_for_the_sync_that_has_begun(folder: Path) -> None:
    """Which waits for the running requests to pause."""
    engine, other = start(folder), start(folder, seed=5)
    # Long enough for the sync to come within the response on a busy machine.
    long = replace(FORCED, max_tokens=60, min_tokens=60)
    requests = [replace(each, name=name) for each, name in zip(make_requests(2, sampling=long), "ab", strict=True)]

    def abort_and_sync() -> None:
        engine.gate.begin(1)
        engine.abort(["a"])
        until(lambda: not engine._control.wanted, every_s=0.0)
        engine.pause()
        for mine, new in zip(engine.model.parameters(), other.model.parameters(), strict=True):
            mine.copy_(new)
        engine.resume()
        engine.gate.commit(1)

    completions = while_decoding(engine, requests, forward=4, act=abort_and_sync)
    assert isinstance(completions, list)
    assert completions[0].spans == [Span(version=0, start=0, end=3)]
    first, second = completions[1].spans
    assert (first.version, second.version, second.end) == (0, 1, 60) and first.end >= 3


@pytest.mark.parametrize("cache", CacheAfterSync)
def test_a_sync_into_a_continued_response_splits_what_is_new(folder: Path, cache: CacheAfterSync) -> None:
    """Tokens that an earlier request sampled count in positions and in the prefix, and in no completion."""
    engine, other = start(folder), start(folder, seed=5)
    engine.config = replace(engine.config, cache_after_sync=cache)
    requests = make_requests(2, sampling=GREEDY)
    wholes = engine.generate(requests)
    rest = [
        replace(request, input=request.input.then(whole.token_ids[:3]), first_position=3)
        for request, whole in zip(requests, wholes, strict=True)
    ]

    def sync() -> None:
        engine.gate.begin(1)
        engine.pause()
        for mine, new in zip(engine.model.parameters(), other.model.parameters(), strict=True):
            mine.copy_(new)
        engine.resume()
        engine.gate.commit(1)

    completions = while_decoding(engine, rest, forward=4, act=sync)
    assert isinstance(completions, list)
    for request, whole, completion in zip(rest, wholes, completions, strict=True):
        assert completion.spans == [Span(version=0, start=0, end=3), Span(version=1, start=3, end=6)]
        assert completion.token_ids[:3].tolist() == whole.token_ids[3:6].tolist()
        after = replace(request, input=request.input.then(completion.token_ids[:3]), first_position=6)
        (new,) = other.generate([after])
        recomputed = completion.logprobs[3:] == pytest.approx(new.logprobs, abs=1e-5)
        assert recomputed == (cache is CacheAfterSync.RECOMPUTE)


def test_an_abort_reaches_a_call_that_is_paused(folder: Path) -> None:
    engine = start(folder)

    def pause_and_abort() -> None:
        engine.pause()
        engine.abort()

    completions = while_decoding(engine, make_requests(2, sampling=FORCED), forward=4, act=pause_and_abort)
    assert isinstance(completions, list)
    assert [len(each.token_ids.tolist()) for each in completions] == [3, 3]
    engine.resume()
    assert len(engine.generate(make_requests(1, sampling=FORCED))[0].token_ids.tolist()) == 9


def test_a_sync_that_fails_lets_nothing_go_on(folder: Path) -> None:
    engine = start(folder)

    def broken_sync() -> None:
        engine.gate.begin(1)
        engine.pause()
        engine.gate.fail("a tensor differs")
        engine.resume()

    result = while_decoding(engine, make_requests(2, sampling=FORCED), forward=4, act=broken_sync)
    assert isinstance(result, WeightSyncFailed) and "a tensor differs" in str(result)
