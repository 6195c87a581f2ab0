"""What of the SGLang engine needs no SGLang: its settings and its draw."""

import asyncio
import pickle
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframe import models
from rlframe.models.families.base import Architecture
from rlframe.rollout.base.config import CacheFormat
from rlframe.rollout.base.sampling import draw, keep_likely, uniforms
from rlframe.rollout.sglang import cache, epochs
from rlframe.rollout.sglang.answers import serve
from rlframe.rollout.sglang.config import OWN_OPTIONS, REFUSED_OPTIONS, SglangConfig
from rlframe.rollout.sglang.launch import engine_arguments
from rlframe.rollout.sglang.sampler import FIRST_POSITION, MIN_TOKENS, note, sample
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import ConfigError, RlframeError, WeightSyncFailed

ALL = 1 << 30
"""SGLang's top_k for none."""
EMBEDDED = Path(str(models.__file__)).parent / "embedded/qwen3_moe_tiny"


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"gpu_memory_utilization": 1.0}, "gpu_memory_utilization must be below 1 for SGLang, got 1.0"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1"),
        ({"sleep_level": 3}, "sleep_level must be at most 2, got 3"),
        (
            {"kv_cache_gb": 1.0, "gpu_memory_utilization": 0.4},
            "kv_cache_gb and gpu_memory_utilization both decide the size of the cache",
        ),
        ({"expert_parallel": True}, "expert_parallel needs tp above 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], rule: str):
    with pytest.raises(ValueError, match=rule):
        SglangConfig(**settings)


@pytest.mark.parametrize("name", sorted(OWN_OPTIONS | REFUSED_OPTIONS.keys()))
def test_what_the_engine_sets_itself_or_would_be_wrong_with_is_no_further_option(name: str):
    with pytest.raises(ValueError, match=f"engine_options must not hold {name}"):
        SglangConfig(engine_options={name: 1})


def architecture(**changes: Any) -> Architecture:
    """Of a model of 2 layers with 8 heads and 4 KV heads, dense but for `changes`."""
    values: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_hidden_size": 96,
        "vocab_size": 67,
        "max_positions": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "moe_layers": (False, False),
    }
    return Architecture(**(values | changes))


SIX = {"num_experts": 6, "expert_ffn_hidden_size": 36, "moe_layers": (True, True)}
"""Experts of which 4 devices can take neither equal numbers nor, at 8 devices, equal parts."""


@pytest.mark.parametrize(
    ("settings", "model", "faults"),
    [
        ({"tp": 4}, {}, []),
        ({"tp": 3}, {}, ["tp 3 must divide num_attention_heads 8", "tp 3 must divide num_kv_heads 4"]),
        ({"tp": 4}, SIX, []),
        ({"tp": 8}, SIX, ["tp 8 must divide expert_ffn_hidden_size 36 of qwen3_moe, or ep be set"]),
        ({"tp": 2, "expert_parallel": True}, SIX, []),
        ({"tp": 4, "expert_parallel": True}, SIX, ["tp 4 must divide num_experts 6 of qwen3_moe"]),
        ({"tp": 2, "expert_parallel": True}, {}, ["ep needs experts, and qwen3_moe is dense"]),
        ({"max_model_len": 129}, {}, ["max_model_len=129 must not exceed the model's 128 positions"]),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_starts(settings: dict, model: dict, faults: list[str]):
    found = list(map(str, SglangConfig(**settings).faults(architecture(**model))))
    assert len(found) == len(faults), found
    for one, text in zip(found, faults, strict=True):
        assert one.startswith("rollout.") and text in one


def arguments_of(dtype: torch.dtype, *, cuda: bool, **settings: Any) -> dict[str, Any]:
    """What SGLang is started with."""
    return engine_arguments(
        SglangConfig(**settings),
        folder=EMBEDDED,
        architecture=architecture(),
        dtype=dtype,
        cuda=cuda,
        stop_tokens=[2],
        random_seed=None,
    )


def test_more_than_one_rank_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match=r"rollout\.tp must be 1 for SGLang on a CPU, got 2"):
        arguments_of(torch.float32, cuda=False, tp=2)
    assert arguments_of(torch.bfloat16, cuda=True, tp=2)["tp_size"] == 2


def test_float32_is_refused_on_cuda_where_sglang_has_no_kernels_for_it():
    with pytest.raises(ConfigError, match=r"rollout\.dtype must be bfloat16 for SGLang on CUDA, .* got float32"):
        arguments_of(torch.float32, cuda=True)
    assert arguments_of(torch.float32, cuda=False)["dtype"] == "float32"
    assert arguments_of(torch.bfloat16, cuda=True)["enable_memory_saver"]


def test_a_cache_of_a_given_size_holds_as_many_tokens_on_any_device():
    # 2 layers of 4 heads of 16 numbers of 2 bytes, keys and values: 512 bytes a token, half of them on each of 2 ranks.
    assert "max_total_tokens" not in arguments_of(torch.bfloat16, cuda=True)
    assert arguments_of(torch.bfloat16, cuda=True, kv_cache_gb=0.1)["max_total_tokens"] == 195_312
    assert arguments_of(torch.bfloat16, cuda=True, tp=2, kv_cache_gb=0.1)["max_total_tokens"] == 390_625
    assert arguments_of(torch.bfloat16, cuda=False, kv_cache_gb=0.1)["max_total_tokens"] == 195_312
    assert not arguments_of(torch.bfloat16, cuda=True, sleep_level=0)["enable_memory_saver"]
    eight = arguments_of(torch.bfloat16, cuda=True, kv_cache_gb=0.1, kv_cache_dtype=CacheFormat.FP8)
    assert (eight["kv_cache_dtype"], eight["max_total_tokens"]) == ("fp8_e4m3", 390_625)
    assert arguments_of(torch.bfloat16, cuda=True)["kv_cache_dtype"] == "auto"


def test_attention_takes_no_numbers_that_a_cache_in_8_bits_has_not():
    layer = torch.nn.Identity()
    layer.register_forward_pre_hook(cache.within_limit)
    layer.forward = lambda *arguments, **named: (arguments, named)  # type: ignore[method-assign]
    far = torch.tensor([-1e4, -448.0, -0.3, 447.0, 3e38, torch.inf], dtype=torch.bfloat16)
    (queries, keys, values, batch), named = layer(far, far.view(2, 3), -far, "batch", save_kv_cache=False)
    held = torch.tensor([-448.0, -448.0, -0.3, 447.0, 448.0, 448.0]).bfloat16()
    assert torch.equal(queries, held) and torch.equal(keys, held.view(2, 3)) and torch.equal(values, -held)
    assert (batch, named) == ("batch", {"save_kv_cache": False})
    # A layer that reads the keys and values of another.
    assert layer(far, None, None, "batch")[0][1:] == (None, None, "batch")


def test_experts_are_shared_out_over_all_ranks_or_none():
    assert arguments_of(torch.bfloat16, cuda=True, tp=4)["ep_size"] == 1
    assert arguments_of(torch.bfloat16, cuda=True, tp=4, expert_parallel=True)["ep_size"] == 4


class Calls:
    """A host whose calls end in all ways."""

    async def result(self) -> int:
        return 5

    async def error(self) -> None:
        # Of no kind that a caller could list, as fastapi's HTTPException is in the process of SGLang.
        raise type("HTTPException", (Exception,), {})("The request queue is full.")

    async def own_error(self) -> None:
        raise WeightSyncFailed("not synced")

    async def no_message(self) -> Any:
        return lambda: None

    async def cancelled(self) -> None:
        raise asyncio.CancelledError

    def no_coroutine(self) -> None:
        pass


def test_every_call_is_answered_whatever_it_raises_or_returns():
    ours, theirs = Pipe()
    host: Any = Calls()
    calls = [Calls.result, Calls.error, Calls.own_error, Calls.no_message, Calls.cancelled, Calls.no_coroutine]
    for number, method in enumerate(calls):
        ours.send_bytes(pickle.dumps((number, RankCall.of(method))))

    async def served() -> list[tuple[int, Any, Any]]:
        serving = asyncio.create_task(serve(host, theirs))
        answers = await asyncio.to_thread(lambda: [ours.recv() for _ in calls if ours.poll(10)])
        ours.close()
        await serving
        return answers

    answers = {number: (result, failure) for number, result, failure in asyncio.run(served())}
    assert answers[0] == (5, None)
    assert {type(failure) for _, failure in answers.values()} == {type(None), RlframeError, WeightSyncFailed}
    assert str(answers[1][1]) == "SGLang: HTTPException('The request queue is full.')"
    assert str(answers[2][1]) == "not synced"
    assert "pickle" in str(answers[3][1]) and str(answers[4][1]) == "SGLang: CancelledError()"
    assert "TypeError" in str(answers[5][1])


def batch(*rows: tuple[int, int, int]) -> Any:
    """A ScheduleBatch of requests with (seed, prompt tokens, min_tokens)."""
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(
                origin_input_ids=[0] * prompt,
                sampling_params=SimpleNamespace(sampling_seed=seed, custom_params={MIN_TOKENS: minimum}),
            )
            for seed, prompt, minimum in rows
        ]
    )


def info(top_ks: list[int], top_ps: list[float]) -> Any:
    """A SamplingBatchInfo."""
    return SimpleNamespace(
        device="cpu", is_all_greedy=True, top_ks=torch.tensor(top_ks), top_ps=torch.tensor(top_ps), sampling_seed=None
    )


def test_stop_tokens_are_not_drawn_before_min_tokens_and_the_probabilities_stay():
    one = info([ALL, ALL], [1.0, 1.0])
    note(one, batch((7, 3, 2), (7, 3, 0)), 3)
    assert not one.is_all_greedy
    probs = torch.tensor([[0.0, 0.999, 0.001]] * 2)
    # Positions 2 and 3 of a prompt of 3 tokens are those of the response's first and second token.
    for position in (2, 3):
        tokens = sample(probs, one, torch.full((2,), position), stop_tokens=torch.tensor([1]), simple=True)
        assert tokens.tolist() == [2, 1]
    assert sample(probs, one, torch.full((2,), 4), stop_tokens=torch.tensor([1]), simple=True).tolist() == [1, 1]
    assert torch.equal(probs, torch.tensor([[0.0, 0.999, 0.001]] * 2))


def test_a_continued_response_has_the_numbers_and_the_min_tokens_of_the_whole():
    whole, rest = info([ALL], [1.0]), info([ALL], [1.0])
    note(whole, batch((7, 3, 6)), 3)
    continued = batch((7, 5, 6))
    continued.reqs[0].sampling_params.custom_params[FIRST_POSITION] = 2
    note(rest, continued, 3)
    assert torch.equal(whole.sampling_seed, rest.sampling_seed)


def test_a_greedy_batch_without_min_tokens_keeps_its_shortcut():
    one = info([1], [1.0])
    note(one, batch((7, 3, 0)), 3)
    assert one.is_all_greedy


def test_what_a_request_draws_depends_on_its_own_filters_alone():
    probs = torch.rand(4, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    settings = [(ALL, 1.0), (5, 1.0), (ALL, 0.3), (7, 0.6)]
    rows = [(100 + row, 4, 0) for row in range(4)]
    together = info([top_k for top_k, _ in settings], [top_p for _, top_p in settings])
    note(together, batch(*rows), 50)
    mixed = sample(probs, together, torch.full((4,), 9), stop_tokens=torch.tensor([], dtype=torch.int64), simple=False)
    for row, (top_k, top_p) in enumerate(settings):
        # Token number 9 + 1 - 4 of the response, and the rule of the transformers engine.
        uniform = uniforms(torch.tensor([100 + row]), torch.tensor([6]))
        alone = probs[row : row + 1]
        if (top_k, top_p) == (ALL, 1.0):
            expected = draw(alone, uniform)
        else:
            likely, order = alone.sort(dim=-1, descending=True, stable=True)
            kept = keep_likely(likely, top_k=0 if top_k == ALL else top_k, top_p=top_p)
            expected = order.gather(1, draw(kept, uniform)[:, None])[:, 0]
        assert mixed[row] == expected[0]


class Scheduler:
    """What epochs know of SGLang's."""

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []

    def _add_request_to_queue(self, request: Any, is_retracted: bool = False) -> None:
        self.waiting_queue.append(request)


def test_requests_of_different_epochs_have_different_keys_of_the_prefix_cache():
    epochs.install(Scheduler)
    scheduler = Scheduler()
    runs, waits, comes, falls_back = (SimpleNamespace(extra_key=None) for _ in range(4))
    scheduler._add_request_to_queue(runs)
    scheduler.waiting_queue.clear()
    scheduler._add_request_to_queue(waits)
    assert waits.extra_key is None
    epochs.begin(scheduler)
    scheduler._add_request_to_queue(comes)
    assert runs.extra_key is None and waits.extra_key == comes.extra_key == "rlframe 1"
    scheduler.waiting_queue.clear()
    epochs.begin(scheduler)
    scheduler._add_request_to_queue(falls_back, is_retracted=True)
    assert (waits.extra_key, falls_back.extra_key) == ("rlframe 1", "rlframe 2")
