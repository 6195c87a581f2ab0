"""What syncs do to an engine that samples: old weights before, new ones after, and nothing of both."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframe.rollout.base.config import CacheAfterSync
from rlframe.rollout.base.engine import RolloutEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import GenerationRequest, SamplingParams, Span
from rlframe.utils.errors import EngineDied
from tests.contracts.engines.trainer import (
    CLOSE,
    Case,
    Running,
    make,
    mixed_nats,
    nats,
    perturbed,
    run,
    transformers_model,
    verify,
)
from tests.rollout_models import make_requests

pytestmark = pytest.mark.later

LONG = SamplingParams(max_tokens=400, min_tokens=400)
Fresh = tuple[RolloutEngine, list[psutil.Process], dict[str, Tensor]]


def test_a_sync_within_responses_splits_them_at_the_token(case: Case):
    """Before the split every logprob is of the old weights; after it of the new ones, keys and values included."""
    requests = make_requests(3, sampling=SamplingParams(temperature=0.8, max_tokens=300, min_tokens=300))
    new = perturbed(case.weights, seed=1)
    case.trainer.train(new)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 20)
    counts: list[int] = []
    case.destination.after_pause = lambda: (time.sleep(0.3), counts.extend(case.kind.counts(case.engine)))
    case.sync.publish(version=1)
    old_model, new_model = transformers_model(case.folder, case.weights), transformers_model(case.folder, new)
    for request, completion in zip(requests, running.result(timeout=120), strict=True):
        before, after = completion.spans
        assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 300)
        assert before.end == after.start >= 20
        logprobs = torch.tensor(completion.logprobs)
        old, new_nats = (nats(model, request, completion.token_ids.tolist()) for model in (old_model, new_model))
        torch.testing.assert_close(logprobs[: before.end], old[: before.end], **CLOSE)
        torch.testing.assert_close(logprobs[after.start :], new_nats[after.start :], **CLOSE)
        assert abs(old[after.start] - logprobs[after.start]) > 1e-3
    # What was there a while after the pause is what the split says.
    assert sorted(counts) == sorted(each.spans[0].end for each in running.result())


@pytest.fixture
def keeping(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The case, with an engine whose running requests keep their keys and values."""
    monkeypatch.setattr(case.engine.config, "cache_after_sync", CacheAfterSync.KEEP)
    return case


def same_prompt(count: int, **sampling: Any) -> list[GenerationRequest]:
    """Requests of one long prompt, whose blocks an engine shares among them."""
    prompt = ModelInput(tuple(5 + index % 60 for index in range(400)))
    return [GenerationRequest(input=prompt, sampling=SamplingParams(**sampling), seed=seed) for seed in range(count)]


def test_kept_keys_and_values_are_those_of_the_old_weights_and_serve_no_new_request(keeping: Case):
    """Not while the old requests run, and not when they have ended."""
    case, short = keeping, same_prompt(1, temperature=0.0, max_tokens=6, min_tokens=6)
    requests = same_prompt(3, temperature=0.8, max_tokens=300, min_tokens=300)
    new = perturbed(case.weights, seed=1)
    case.trainer.train(new)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 20)
    counts: list[int] = []
    case.destination.after_pause = lambda: (time.sleep(0.3), counts.extend(case.kind.counts(case.engine)))
    case.sync.publish(version=1)
    during = case.engine.generate(short) if case.engine.max_calls > 1 else []
    assert not during or not running.done(), "the old requests run longer"
    old_model, new_model = transformers_model(case.folder, case.weights), transformers_model(case.folder, new)
    for request, completion in zip(requests, running.result(timeout=120), strict=True):
        before, after = completion.spans
        assert (before.version, after.version, after.end) == (0, 1, 300) and before.end >= 20
        logprobs, tokens = torch.tensor(completion.logprobs), completion.token_ids.tolist()
        torch.testing.assert_close(logprobs[: before.end], nats(old_model, request, tokens)[: before.end], **CLOSE)
        mixed = mixed_nats(old_model, new_model, request, tokens, split=before.end)
        torch.testing.assert_close(logprobs[before.end :], mixed, **CLOSE)
        assert (logprobs - nats(new_model, request, tokens))[before.end :].abs().max() > 1e-2
    assert sorted(counts) == sorted(each.spans[0].end for each in running.result())
    for completion in [*during, *case.engine.generate(short)]:
        expected = nats(new_model, short[0], completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
        assert completion.spans == [Span(version=1, start=0, end=6)]


def test_requests_that_wait_for_a_place_begin_with_the_new_weights_alone(
    keeping: Case, monkeypatch: pytest.MonkeyPatch
):
    """Although others with their prompt have its keys and values by the old ones."""
    case = keeping
    if case.engine.max_calls == 1:
        monkeypatch.setattr(case.engine.config, "max_batch", 32)
    requests = same_prompt(40, temperature=0.8, max_tokens=100, min_tokens=100)
    new = perturbed(case.weights, seed=1)
    case.trainer.train(new)
    running = run(lambda: case.engine.generate(requests))
    case.kind.wait_for_tokens(case.engine, 20, every=False)
    case.sync.publish(version=1)
    old_model, new_model = transformers_model(case.folder, case.weights), transformers_model(case.folder, new)
    pairs = list(zip(requests, running.result(timeout=120), strict=True))
    waited = [(request, completion) for request, completion in pairs if len(completion.spans) == 1]
    ran = [(request, completion) for request, completion in pairs if len(completion.spans) == 2]
    assert len(waited) >= 8 and len(ran) > 8 and len(waited) + len(ran) == 40
    for request, completion in waited:
        assert completion.spans == [Span(version=1, start=0, end=100)]
        expected = nats(new_model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    for request, completion in ran[::8]:
        split = completion.spans[0].end
        expected = mixed_nats(old_model, new_model, request, completion.token_ids.tolist(), split=split)
        torch.testing.assert_close(torch.tensor(completion.logprobs)[split:], expected, **CLOSE)


@pytest.mark.parametrize("cache", CacheAfterSync)
def test_nothing_of_the_prefix_cache_outlives_a_sync(
    case: Case, cache: CacheAfterSync, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(case.engine.config, "cache_after_sync", cache)
    (request,) = same_prompt(1, temperature=0.0, max_tokens=6, min_tokens=6)
    case.engine.generate([request])
    new = perturbed(case.weights, seed=2)
    case.trainer.train(new)
    case.sync.publish(version=1)
    (completion,) = case.engine.generate([request])
    expected = nats(transformers_model(case.folder, new), request, completion.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    assert completion.spans == [Span(version=1, start=0, end=6)]


@pytest.fixture(scope="module")
def fresh(running: Running, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """An engine started from a checkpoint with other weights, its processes, and those weights."""
    place = tmp_path_factory.mktemp("new")
    make("qwen3_moe", place)
    new = perturbed(load_file(folder / "model.safetensors"), seed=3)
    save_file(new, place / "model.safetensors", metadata={"format": "pt"})
    before = set(psutil.Process().children(recursive=True))
    engine = running.kind.start(place)
    verify(engine, 1)
    yield engine, list(set(psutil.Process().children(recursive=True)) - before), new
    engine.close()


def test_greedy_responses_after_a_sync_are_those_of_an_engine_started_from_the_new_checkpoint(case: Case, fresh: Fresh):
    started, _, new = fresh
    case.trainer.train(new)
    case.sync.publish(version=1)
    requests = make_requests(8, sampling=SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20))
    for ours, theirs in zip(case.engine.generate(requests), started.generate(requests), strict=True):
        # Which requests share a forward pass is a matter of time, and with it the last bits.
        assert replace(ours, logprobs=theirs.logprobs) == theirs
        assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)


def test_an_engine_that_is_killed_fails_its_requests_and_leaves_no_process(served: Running, fresh: Fresh):
    """Comes last: the fresh engine is gone after it."""
    engine, processes, _ = fresh
    calls = run(lambda: engine.generate(make_requests(2, sampling=LONG)))
    served.kind.wait_for_tokens(engine, 5)
    (core,) = (each for each in processes if served.kind.core in each.name() + " ".join(each.cmdline()))
    core.kill()
    with pytest.raises(EngineDied, match="died during"):
        calls.result(timeout=60)
    assert not engine.is_alive()
    engine.close()
    assert not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
