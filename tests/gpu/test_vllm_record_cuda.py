"""The record of sampled tokens in vLLM's worker beside vLLM's own logprobs, with CUDA graphs and async scheduling."""

import asyncio
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.rollout.vllm.pending import prompt, sampling_parameters
from rlframe.types.rollout import FinishReason, GenerationRequest, SamplingParams
from tests.contracts.engines.trainer import make, verify
from tests.gpu.test_engine_contract_cuda import MEAN_NATS, gap_nats
from tests.rollout_models import make_requests
from tests.until import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make("qwen3_tied", tmp_path_factory.mktemp("model"))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    """vLLM on the GPU, its weights verified as version 3. Its cache holds less than 32 long responses, so that vLLM
    preempts some."""
    config = VllmConfig(
        gpu_memory_utilization=0.2,
        max_num_seqs=32,
        compile=False,
        engine_options={"num_gpu_blocks_override": 200, "block_size": 16},
    )
    running = VllmEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda")
    verify(running, 3)
    yield running
    running.close()


def both(engine: VllmEngine, requests: list[GenerationRequest]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Logprobs of each response from the record, and from vLLM itself, of the same steps."""
    assert engine._fetcher is not None
    fetcher = engine._fetcher

    async def one(request: GenerationRequest) -> tuple[np.ndarray, np.ndarray]:
        # A record begins once.
        with fetcher.record(f"both-{uuid4()}") as record:
            parameters = sampling_parameters(request, stop_tokens=engine.stop_tokens, record=record)
            parameters.logprobs, parameters.flat_logprobs = 0, True
            async for output in engine._engine.generate(prompt(request.input, epoch=0), parameters, record):
                (piece,) = output.outputs
            recorded, _ = await fetcher.take(record, list(piece.token_ids))
        return recorded, np.array(piece.logprobs.logprobs, dtype=np.float32)

    async def every() -> list[tuple[np.ndarray, np.ndarray]]:
        return await asyncio.gather(*map(one, requests))

    return engine._wait(every(), doing="generation with logprobs both ways")


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0}, {"temperature": 0.0}, {"top_k": 5, "min_tokens": 40}],
)
def test_the_record_has_vllms_own_logprobs_bit_for_bit(engine: VllmEngine, settings: dict[str, float]):
    requests = make_requests(12, group_size=4, sampling=SamplingParams(max_tokens=60, **settings))
    for recorded, own in both(engine, requests):
        assert len(recorded) and recorded.tobytes() == own.tobytes()


def test_logprobs_are_of_the_model_while_vllm_preempts_requests(engine: VllmEngine, folder: Path):
    requests = make_requests(10, group_size=4, sampling=SamplingParams(max_tokens=150, min_tokens=150))
    completions = engine.generate(requests)
    assert all(len(each.token_ids) == 150 for each in completions)
    assert gap_nats(folder, requests, completions) < MEAN_NATS


def test_stop_strings_end_responses_whose_logprobs_are_their_own(engine: VllmEngine, folder: Path):
    requests = make_requests(10, group_size=4, sampling=SamplingParams(max_tokens=60, stop=("1", "e")))
    completions = engine.generate(requests)
    assert any(each.finish_reason is FinishReason.STOP for each in completions)
    assert gap_nats(folder, requests, completions) < MEAN_NATS


def test_an_abort_keeps_the_logprobs_of_the_tokens_before_it(engine: VllmEngine, folder: Path):
    requests = make_requests(4, sampling=SamplingParams(max_tokens=700, min_tokens=700))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, requests)
        until(lambda: max(map(engine._num_sampled, engine._running()), default=0) > 5)
        engine.abort()
        completions = running.result(timeout=60)
    aborted = [each for each in completions if each.finish_reason is FinishReason.ABORT]
    assert aborted and gap_nats(folder, requests, completions) < MEAN_NATS
