"""vLLM on the CPU, beside transformers: tokens, logprobs, stops, syncs between and within responses, death."""

import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.rollout import FinishReason, GenerationRequest, SamplingParams, Span
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import EngineDied, WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import WeightSync
from tests.contracts.engines.trainer import (
    STOP_TOKENS,
    OneEngine,
    Trainer,
    make,
    nats,
    perturbed,
    run,
    synced,
    transformers_model,
)
from tests.rollout_models import make_requests

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
]
LONG = SamplingParams(max_tokens=400, min_tokens=400)
CLOSE = {"atol": 1e-4, "rtol": 0}


def start(folder: Path, *, tp: int = 1) -> VllmEngine:
    config = VllmConfig(enforce_eager=True, max_num_seqs=32, tp=tp)
    return VllmEngine(config, folder=folder, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(name, tmp_path_factory.mktemp(name)) for name in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> Iterator[dict[str, VllmEngine]]:
    with ThreadPoolExecutor() as pool:
        started = dict(zip(folders, pool.map(start, folders.values()), strict=True))
    yield started
    for engine in started.values():
        engine.close()


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class Case:
    """An engine and its trainer, both at the checkpoint's weights, which are version 0."""

    engine: VllmEngine
    folder: Path
    weights: dict[str, Tensor]
    trainer: Trainer
    destination: OneEngine
    sync: WeightSync


@pytest.fixture
def case(name: str, engines: dict[str, VllmEngine], folders: dict[str, Path]) -> Case:
    weights = load_file(folders[name] / "model.safetensors")
    return Case(engines[name], folders[name], weights, *synced(engines[name], weights))


def wait_for_tokens(engine: VllmEngine, count: int) -> None:
    """Until every running response has so many."""
    deadline = time.monotonic() + 60
    while True:
        streams = engine._running()
        if streams and all(len(stream.token_ids) >= count for stream in streams):
            return
        assert time.monotonic() < deadline, "the engine samples"
        time.sleep(0.005)


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


def test_responses_stop_where_the_transformers_engine_stops(case: Case):
    other = TransformersEngine(TransformersConfig(), folder=case.folder, dtype=torch.float32, device="cpu")
    other.gate.begin(0)
    other.gate.commit(0)
    assert case.engine.stop_tokens == other.stop_tokens == STOP_TOKENS
    settings = [
        {"max_tokens": 30},
        {"max_tokens": 30, "min_tokens": 6},
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": 30, "stop": ("w2",)},
        {"max_tokens": 30, "min_tokens": 4, "stop": ("w4", "w5 w")},
        {"max_tokens": 1},
    ]
    requests = [
        request
        for each in settings
        for request in make_requests(10, sampling=SamplingParams(temperature=0.0, **each), longest=8)
    ]
    mine, theirs = case.engine.generate(requests), other.generate(requests)
    for one, another in zip(mine, theirs, strict=True):
        assert one.token_ids.tolist() == another.token_ids.tolist()
        assert one.finish_reason is another.finish_reason
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(another.logprobs), **CLOSE)
    assert {each.finish_reason for each in mine} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({len(each.token_ids.tolist()) for each in mine}) > 8


def test_many_calls_at_once_answer_as_one_call_does(case: Case):
    requests = make_requests(12, sampling=SamplingParams(max_tokens=12))
    together = case.engine.generate(requests)
    with ThreadPoolExecutor(max_workers=len(requests)) as pool:
        apart = list(pool.map(lambda request: case.engine.generate([request])[0], requests))
    for one, other in zip(together, apart, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.finish_reason is other.finish_reason


def test_scores_are_those_of_transformers_at_temperature_1(case: Case):
    sequences = [request.token_ids.tolist() for request in make_requests(5, sampling=LONG)] + [(7,)]
    model = transformers_model(case.folder, case.weights)
    for sequence, scores in zip(sequences, case.engine.score(sequences), strict=True):
        request = GenerationRequest(token_ids=sequence[:1], sampling=SamplingParams(), seed=0)
        expected = nats(model, request, list(sequence[1:])) if len(sequence) > 1 else torch.zeros(0)
        torch.testing.assert_close(torch.tensor(scores), expected, **CLOSE)


def test_abort_returns_what_there_is(case: Case):
    requests = make_requests(3, sampling=LONG)
    running = run(lambda: case.engine.generate(requests))
    wait_for_tokens(case.engine, 5)
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


def test_a_sync_within_responses_splits_them_at_the_token(case: Case):
    """Before the split every logprob is of the old weights; after it of the new ones, keys and values included."""
    requests = make_requests(3, sampling=SamplingParams(temperature=0.8, max_tokens=300, min_tokens=300))
    running = run(lambda: case.engine.generate(requests))
    wait_for_tokens(case.engine, 20)
    new = perturbed(case.weights, seed=1)
    case.trainer.train(new)
    counts = []
    case.destination.after_pause = lambda: (time.sleep(0.3), counts.extend(map(len, _responses(case.engine))))
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
    # What had arrived a while after the pause is what the split says.
    assert sorted(counts) == sorted(each.spans[0].end for each in running.result())


def _responses(engine: VllmEngine) -> list[list[int]]:
    return [stream.token_ids for stream in engine._running()]


def test_nothing_of_the_prefix_cache_outlives_a_sync(case: Case):
    prompt = tuple(5 + index % 60 for index in range(400))
    request = GenerationRequest(
        token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6), seed=0
    )
    case.engine.generate([request])
    new = perturbed(case.weights, seed=2)
    case.trainer.train(new)
    case.sync.publish(version=1)
    (completion,) = case.engine.generate([request])
    expected = nats(transformers_model(case.folder, new), request, completion.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    assert completion.spans == [Span(version=1, start=0, end=6)]


def test_sleeping_changes_nothing_on_the_cpu(case: Case):
    requests = make_requests(3, sampling=SamplingParams(max_tokens=5))
    before = case.engine.generate(requests)
    case.engine.sleep()
    case.engine.wake_weights()
    case.engine.wake()
    assert not case.engine.weights_lost
    assert case.engine.generate(requests) == before


def test_a_prompt_without_room_is_refused(case: Case):
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        case.engine.generate([GenerationRequest(token_ids=(), sampling=LONG, seed=0)])
    with pytest.raises(ValueError, match="625 tokens and a response of 400 exceed the 1024 positions"):
        case.engine.generate([GenerationRequest(token_ids=(5,) * 625, sampling=LONG, seed=0)])
    with pytest.raises(ValueError, match="sequences of 1 to 1023 tokens"):
        case.engine.score([(5,) * 1024])


def test_a_packed_engine_says_which_tensor_keeps_it_from_direct_copies(case: Case):
    (info,) = case.engine.on_ranks([RankCall.of(DestinationRank.describe)])
    assert info.layout is None and info.can_reload
    assert info.refusal.startswith("keeps model.layers.0.self_attn.qkv_proj.weight repacked by vLLM")
    assert case.sync.choice.streams


def test_errors_of_a_rank_arrive_as_what_they_are(case: Case):
    with pytest.raises(WeightSyncFailed, match="connect on rank 0 of vLLM: AttributeError.*'transport'"):
        case.engine.on_ranks([RankCall.of(DestinationRank.connect, "not a link")])
    assert case.engine.is_alive()


def test_greedy_responses_after_a_sync_are_those_of_an_engine_started_from_the_new_checkpoint(
    engines: dict[str, VllmEngine], folders: dict[str, Path], tmp_path: Path
):
    """And that engine, killed, fails its requests instead of hanging, and leaves no process."""
    engine, folder = engines["qwen3_moe"], tmp_path / "new"
    weights = load_file(folders["qwen3_moe"] / "model.safetensors")
    new = perturbed(weights, seed=3)
    make("qwen3_moe", folder)
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
    trainer, _, sync = synced(engine, weights)
    trainer.train(new)
    sync.publish(version=1)
    before = set(psutil.Process().children())
    fresh = start(folder)
    (core,) = set(psutil.Process().children()) - before
    fresh.gate.begin(1)
    fresh.gate.commit(1)
    requests = make_requests(8, sampling=SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20))
    assert engine.generate(requests) == fresh.generate(requests)

    running = run(lambda: fresh.generate(make_requests(2, sampling=LONG)))
    wait_for_tokens(fresh, 5)
    core.kill()
    with pytest.raises(EngineDied, match="died during generation of 2 responses"):
        running.result(timeout=60)
    assert not fresh.is_alive()
    fresh.close()
    assert not core.is_running()


def test_every_rank_of_a_tensor_parallel_engine_gets_the_weights(folders: dict[str, Path]):
    engine, folder = start(folders["qwen3_moe"], tp=2), folders["qwen3_moe"]
    weights = load_file(folder / "model.safetensors")
    trainer, _, sync = synced(engine, weights)
    new = perturbed(weights, seed=4)
    trainer.train(new)
    sync.publish(version=1)
    model = transformers_model(folder, new)
    requests = make_requests(3, sampling=SamplingParams(temperature=0.8, max_tokens=12))
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    engine.close()
