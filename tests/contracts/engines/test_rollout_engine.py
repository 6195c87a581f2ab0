"""Every engine of rlframe/rollout: its place in the config, its tokens, its logprobs, its weights."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlframe.rollout.base.config import CacheAfterSync, RolloutConfig
from rlframe.rollout.base.engine import RolloutEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import FinishReason, SamplingParams, Span
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.utils.registry import find
from rlframe.weight_sync.border import SourceRank
from rlframe.weight_sync.layout.memory import load_tensor
from rlframe.weight_sync.proof.digest import region_digests
from tests.contracts.engines.kinds import ENGINES
from tests.contracts.engines.trainer import (
    STOP_TOKENS,
    Described,
    Trainer,
    experts,
    nats,
    perturbed,
    synced,
    transformers_model,
    verify,
)
from tests.rollout_models import make_requests

pytestmark = pytest.mark.later

CONFIGS = Path(__file__).parents[3] / "configs" / "rollout"
FORCED = SamplingParams(max_tokens=8, min_tokens=8)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_one_file_and_one_yaml(name: str):
    component, config = find("rlframe.rollout", name, key="rollout.name")
    assert issubclass(component, RolloutEngine) and not inspect.isabstract(component)
    assert issubclass(config, RolloutConfig)
    assert f"name: {name}" in (CONFIGS / f"{name}.yaml").read_text()
    # Every value has its default in the dataclass.
    assert config(name=name).max_tokens == next(field.default for field in fields(config) if field.name == "max_tokens")


def test_completions_come_in_order_with_logprobs_of_the_sampling_distribution(engine: RolloutEngine, folder: Path):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, min_tokens=8)
    requests = make_requests(7, group_size=2, sampling=sampling)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        tokens = torch.tensor([[*request.input.token_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = (model(tokens).logits[0] / 0.8).log_softmax(-1)
        first = len(request.input)
        expected = logprobs[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        assert completion.spans == [Span(version=3, start=0, end=8)]
        assert completion.finish_reason is FinishReason.LENGTH


def test_greedy_tokens_are_the_models_likeliest(engine: RolloutEngine, folder: Path):
    """And so the same from every engine, in float32, where no two logits of this model are equal."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12)
    requests = make_requests(6, sampling=sampling)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        tokens = torch.tensor([[*request.input.token_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(request.input) - 1 : -1]
        logits[:, STOP_TOKENS] = -torch.inf  # min_tokens
        assert completion.token_ids.tolist() == logits.argmax(-1).tolist()


def test_more_prompt_tokens_than_an_engine_reads_at_once(engine: RolloutEngine, folder: Path):
    requests = make_requests(200, sampling=SamplingParams(max_tokens=2, min_tokens=2), longest=100)
    assert sum(len(request.input) for request in requests) > 9000
    completions = engine.generate(requests)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, completion in list(zip(requests, completions, strict=True))[::10]:
        tokens = torch.tensor([[*request.input.token_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, -3:-1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, -2:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    assert [each.token_ids.tolist() for each in engine.generate(requests)] == [
        each.token_ids.tolist() for each in completions
    ]


def test_seeds_repeat_and_differ(engine: RolloutEngine):
    requests = make_requests(5, group_size=4, sampling=FORCED)
    first = [completion.token_ids.tolist() for completion in engine.generate(requests)]
    assert [completion.token_ids.tolist() for completion in engine.generate(requests)] == first
    assert len({tuple(tokens) for tokens in first}) > 15


def test_scores_are_logprobs_of_every_token_but_the_first(engine: RolloutEngine, folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = [request.input for request in make_requests(4, sampling=FORCED)] + [ModelInput((9,))]
    for sequence, scores in zip(sequences, engine.score(sequences), strict=True):
        tokens = torch.from_numpy(sequence.token_ids).long()[None]
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=0)


def test_the_top_is_that_of_every_token_but_the_first_with_the_rest_behind(engine: RolloutEngine, folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = [request.input for request in make_requests(4, sampling=FORCED)] + [ModelInput((9,))]
    for sequence, found in zip(sequences, engine.top(sequences, 30), strict=True):
        with torch.no_grad():
            logprobs = model(torch.from_numpy(sequence.token_ids).long()[None]).logits[0, :-1].log_softmax(-1)
        nats, ids = logprobs.topk(30, dim=1)
        assert found.ids.dtype == torch.int32 and torch.equal(found.ids.long(), ids)
        rest = logprobs.exp().sum(1, keepdim=True) - nats.exp().sum(1, keepdim=True)
        torch.testing.assert_close(found.logprobs, torch.cat([nats, rest.log()], 1), atol=1e-4, rtol=0)


def test_the_layout_finds_every_tensor_of_the_checkpoint_in_the_engine_or_says_why_not(
    described: Described, folder: Path
):
    disk = load_file(folder / "model.safetensors")
    for info, held in described:
        assert info.tensors == {name: tuple(value.shape) for name, value in disk.items()}
        if info.layout is None:
            assert info.refusal and info.can_reload
            continue
        memory = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in info.layout.parameters.items()}
        for name, value in disk.items():
            load_tensor(info.layout, memory, name, value)
            boxes = info.layout.boxes.get(name, ())
            assert held.get(name, {}) == region_digests(boxes, memory, [box.region for box in boxes])


def test_unverified_weights_are_not_sampled(engine: RolloutEngine):
    engine.gate.fail("for the test")
    with pytest.raises(WeightSyncFailed, match="for the test"):
        engine.generate(make_requests(1, sampling=FORCED))
    with pytest.raises(WeightSyncFailed, match="for the test"):
        engine.score([ModelInput((5, 6))])
    verify(engine, 3)


def test_requests_that_come_during_a_sync_wait_for_its_version(engine: RolloutEngine):
    engine.gate.begin(4)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.generate, make_requests(1, sampling=FORCED))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        verify(engine, 4)
        (completion,) = waiting.result(timeout=60)
    assert completion.spans == [Span(version=4, start=0, end=8)]
    verify(engine, 3)


def test_a_sync_is_proved_and_what_follows_is_of_its_version(
    engine: RolloutEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    old = load_file(folder / "model.safetensors")
    new = perturbed(old, seed=1)
    trainer, _, sync = synced(engine, old)
    trainer.train(new)
    sync.publish(version=1)
    requests = make_requests(4, sampling=FORCED)
    model = transformers_model(folder, new)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), nats(model, request, completion.token_ids.tolist()), atol=1e-4, rtol=0
        )
        assert completion.spans == [Span(version=1, start=0, end=8)]

    def lie(calls: list[RankCall]) -> list[Any]:
        (answer,) = Trainer.on_ranks(trainer, calls)
        if calls[0].method is SourceRank.send:
            answer.digests[0] ^= np.uint64(1)
        return [answer]

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "on_ranks", lie)
        with pytest.raises(WeightSyncFailed, match="version 2"):
            sync.publish(version=2)
    with pytest.raises(WeightSyncFailed):
        engine.generate(requests)
    trainer.train(old)
    sync.publish(version=3)
    assert engine.generate(requests)[0].versions[-1] == 3


@pytest.mark.parametrize("cache", CacheAfterSync)
def test_a_pause_within_a_response_changes_no_token_of_it(
    engine: RolloutEngine, cache: CacheAfterSync, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine.config, "cache_after_sync", cache)
    requests = make_requests(4, sampling=SamplingParams(temperature=0.0, max_tokens=100, min_tokens=100))
    alone = engine.generate(requests)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, requests)
        for _ in range(3):
            engine.pause()
            engine.resume()
        paused = running.result(timeout=120)
    for one, other in zip(alone, paused, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)


def test_routes_are_what_the_routers_choose_also_of_a_cached_prompt_and_after_a_pause(
    engine: RolloutEngine, folder: Path
):
    if list(engine.config.route_faults(cuda=False)):
        assert engine.generate(make_requests(1, sampling=FORCED))[0].routes is None
        pytest.skip("refused by config.check")
    stop = () if list(replace(engine.config, stop=["7"]).route_faults(cuda=False)) else ("7",)
    requests = make_requests(4, group_size=2, sampling=SamplingParams(max_tokens=60, min_tokens=3, stop=stop))
    completions = engine.generate(requests) + engine.generate(requests)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, requests)
        for _ in range(3):
            engine.pause()
            engine.resume()
        completions += running.result(timeout=120)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len({len(completion.token_ids.tolist()) for completion in completions}) > 3
    for request, completion in zip(requests * 3, completions, strict=True):
        assert completion.routes is not None and completion.routes.dtype == np.uint8
        told = torch.from_numpy(completion.routes).long().sort(-1).values
        assert torch.equal(told, experts(model, request, completion.token_ids.tolist()))


def test_an_abort_ends_every_running_response(engine: RolloutEngine):
    requests = make_requests(3, group_size=8, sampling=SamplingParams(max_tokens=400, min_tokens=400))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, requests)
        while not running.done():
            engine.abort()
        completions = running.result(timeout=60)
    assert all(each.finish_reason is FinishReason.ABORT for each in completions)
    assert all(len(each.token_ids.tolist()) == len(each.logprobs) < 400 for each in completions)
    assert all(len(each.versions) == len(each.token_ids) for each in completions)
    assert engine.is_alive()


def test_sleep_and_wake_change_no_result(engine: RolloutEngine):
    requests = make_requests(4, sampling=FORCED)
    before = engine.generate(requests)
    engine.sleep()
    engine.wake_weights()
    engine.wake()
    for one, other in zip(before, engine.generate(requests), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.spans == other.spans
        # A cache that was emptied leads to other batches, and those to other roundings.
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)
