"""The engine contract of `tests/contracts/test_rollout_engine.py` with SGLang on a GPU: same tests, same tolerances.

Float32, because the contract's tolerances are its. SGLang's flash attention has no float32, and its Triton kernels, those
of the experts too, multiply float32 with TF32: so a dense model, and attention by torch.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rlframe.rollout.sglang import SglangConfig, SglangEngine
from rlframe.types.rollout import SamplingParams
from rlframe.utils.errors import EngineDied
from tests.contracts import test_rollout_engine as contract
from tests.contracts.test_rollout_engine import FORCED, verify
from tests.rollout_models import make_requests, make_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

test_completions = contract.test_completions_come_in_order_with_logprobs_of_the_sampling_distribution
test_seeds = contract.test_seeds_repeat_and_differ
test_scores = contract.test_scores_are_logprobs_of_every_token_but_the_first
test_layout = contract.test_the_layout_finds_every_tensor_of_the_checkpoint_in_the_engine_or_says_why_not
test_unverified_weights = contract.test_unverified_weights_are_not_sampled
test_requests_during_a_sync = contract.test_requests_that_come_during_a_sync_wait_for_its_version
test_pause = contract.test_a_pause_within_a_response_changes_no_token_of_it
test_abort = contract.test_an_abort_ends_every_running_response
test_sleep = contract.test_sleep_and_wake_change_no_result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_tokenizer("qwen3_tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SglangEngine]:
    """SGLang on the GPU, its weights verified as version 3; they wait in host memory while it sleeps."""
    config = SglangConfig(
        gpu_memory_utilization=0.2,
        sleep_level=1,
        enforce_eager=True,
        engine_options={
            "prefill_attention_backend": "torch_native",
            "decode_attention_backend": "torch_native",
            "max_total_tokens": 16384,
        },
    )
    running = SglangEngine(config, folder=folder, dtype=torch.float32, device="cuda")
    verify(running, 3)
    yield running
    running.close()


def test_a_sleep_gives_memory_back(engine: SglangEngine):
    engine.sleep()
    # Keys and values of 16384 tokens in 2 layers, each 2 heads of 32 in float32: 16 MiB; and the weights.
    assert engine.freed_bytes is not None and engine.freed_bytes >= 16 << 20
    assert not engine.weights_lost
    engine.wake()
    verify(engine, 3)
    assert len(engine.generate(make_requests(2, sampling=FORCED))) == 2


def test_checksums_by_sglang_itself_are_of_the_weights(engine: SglangEngine):
    (sums,) = engine.checksums()
    assert any("embed_tokens" in name for name in sums) and len(set(sums.values())) > 10


def test_a_dead_scheduler_is_noticed(engine: SglangEngine):
    """The last of this file: it kills the engine."""
    (scheduler,) = (
        process
        for process in psutil.Process(engine._host.process.pid).children(recursive=True)
        if "sglang::scheduler" in " ".join(process.cmdline())
    )
    scheduler.kill()
    with pytest.raises(EngineDied, match="what SGLang said about it stands above"):
        engine.generate(make_requests(2, sampling=SamplingParams(max_tokens=100, min_tokens=100)))
    assert not engine.is_alive()
