"""SGLang with CUDA graphs on a GPU. What of the engine contract (`tests/contracts/engines`) is exact runs as it is;
what compares numbers does it here as bfloat16 allows, since SGLang has no float32 on CUDA."""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframe.rollout.sglang.config import SglangConfig
from rlframe.rollout.sglang.engine import SglangEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, SamplingParams, Span
from rlframe.utils.errors import EngineDied
from tests.contracts.engines import test_rollout_engine as contract
from tests.contracts.engines.test_rollout_engine import FORCED
from tests.contracts.engines.trainer import Described, describe, verify
from tests.rollout_models import make_requests, make_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
MEAN_NATS = 0.03
"""Between bfloat16 and float32 computation of the same weights, the mean over tokens; other weights are nats apart."""

test_layout = contract.test_the_layout_finds_every_tensor_of_the_checkpoint_in_the_engine_or_says_why_not
test_unverified_weights = contract.test_unverified_weights_are_not_sampled
test_requests_during_a_sync = contract.test_requests_that_come_during_a_sync_wait_for_its_version
test_abort = contract.test_an_abort_ends_every_running_response


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_with_tokenizer("qwen3_tied", tmp_path_factory.mktemp("model"))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SglangEngine]:
    """SGLang on the GPU, its weights verified as version 3; they wait in host memory while it sleeps."""
    config = SglangConfig(
        kv_cache_gb=1.0,
        sleep_level=1,
        engine_options={
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32],
            "disable_prefill_cuda_graph": True,
        },
    )
    running = SglangEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda")
    running.described = describe(running)
    verify(running, 3)
    yield running
    running.close()


@pytest.fixture
def described(engine: SglangEngine) -> Described:
    """What its ranks said before anything was connected."""
    return engine.described


def gap_nats(folder: Path, requests: list[GenerationRequest], completions: list[Completion]) -> float:
    """Mean distance of the completions' logprobs from those of transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gaps = []
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor([[*request.input.token_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = (model(tokens).logits[0] / (request.sampling.temperature or 1.0)).log_softmax(-1)
        first = len(request.input)
        expected = logprobs[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]
        gaps.append((torch.tensor(completion.logprobs) - expected).abs())
    return float(torch.cat(gaps).mean())


def test_logprobs_are_of_the_sampling_distribution(engine: SglangEngine, folder: Path):
    for settings in ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0}, {"temperature": 0.0}, {"top_k": 5}):
        sampling = SamplingParams(max_tokens=30, min_tokens=30, **settings)
        requests = make_requests(7, group_size=2, sampling=sampling)
        completions = engine.generate(requests)
        assert gap_nats(folder, requests, completions) < MEAN_NATS
        assert all(each.spans == [Span(version=3, start=0, end=30)] for each in completions)
        assert all(each.finish_reason is FinishReason.LENGTH for each in completions)


def test_seeds_repeat_and_differ(engine: SglangEngine):
    requests = make_requests(5, group_size=4, sampling=FORCED)
    first, second = ([tuple(each.token_ids.tolist()) for each in engine.generate(requests)] for _ in range(2))
    # A draw within bfloat16's noise of a boundary may fall on either side, from batch to batch.
    assert sum(one == other for one, other in zip(first, second, strict=True)) >= 16
    assert len(set(first)) > 15


def test_scores_are_logprobs_of_every_token_but_the_first(engine: SglangEngine, folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gaps = []
    sequences = [request.input for request in make_requests(4, sampling=FORCED)] + [ModelInput((9,))]
    for sequence, scores in zip(sequences, engine.score(sequences), strict=True):
        tokens = torch.from_numpy(sequence.token_ids).long()[None]
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        gaps.append((torch.tensor(scores) - logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0]).abs())
    assert torch.cat(gaps).mean() < MEAN_NATS


def test_a_response_that_was_paused_is_still_of_the_model(engine: SglangEngine, folder: Path):
    """Keys and values computed anew, in batches with an overlap of scheduling and computing that a CPU has not."""
    requests = make_requests(4, sampling=SamplingParams(temperature=0.0, max_tokens=100, min_tokens=100))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, requests)
        for _ in range(5):
            engine.pause()
            engine.resume()
        completions = running.result(timeout=60)
    assert all(len(each.token_ids.tolist()) == 100 for each in completions)
    assert gap_nats(folder, requests, completions) < MEAN_NATS


def test_a_sleep_gives_memory_back_and_keeps_the_weights(engine: SglangEngine, folder: Path):
    before = engine.checksums()
    engine.sleep()
    # Keys and values of 16384 tokens in 2 layers, each 2 heads of 32 in bfloat16: 8 MiB; and the weights.
    assert engine.freed_bytes is not None and engine.freed_bytes >= 8 << 20
    assert not engine.weights_lost
    engine.wake_weights()
    engine.wake()
    verify(engine, 3)
    assert engine.checksums() == before
    (sums,) = before
    assert len(set(sums.values())) > 10
    requests = make_requests(4, sampling=FORCED)
    assert gap_nats(folder, requests, engine.generate(requests)) < MEAN_NATS


def test_a_dead_scheduler_is_noticed(engine: SglangEngine):
    """The last of this file: it kills the engine."""
    (scheduler,) = (
        process
        for process in psutil.Process(engine._host.process.pid).children(recursive=True)
        if "sglang::scheduler" in " ".join(process.cmdline())
    )
    scheduler.kill()
    with pytest.raises(EngineDied, match="see SGLang.s messages above"):
        engine.generate(make_requests(2, sampling=SamplingParams(max_tokens=100, min_tokens=100)))
    assert not engine.is_alive()
