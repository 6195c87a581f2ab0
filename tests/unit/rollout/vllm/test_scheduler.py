"""The short ways of the scheduler against vLLM's own cache manager and scheduler: the same blocks, the same hits
afterwards, and the same steps."""

import importlib.util
import random
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframe.rollout.vllm.decode.admission import Admission
from rlframe.rollout.vllm.decode.ahead import STEP_COST, STEPS
from rlframe.rollout.vllm.decode.scheduler import MARGIN, Repeated, scheduler, shorten
from tests.tiny_models import make

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

SIZE, PROMPTS, RESPONSE = 8, (21, 16, 40), 50
STEPS_SERVED = 400


def manager(*, window: int | None = None) -> Any:
    """vLLM's manager of a cache of 200 blocks."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    config = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=200, scheduler_block_size=SIZE, hash_block_size=SIZE)


def request(name: str, tokens: list[int], *, max_tokens: int = RESPONSE) -> Any:
    """vLLM's request. Token 7 ends it."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=[7])
    return Request(name, tokens, sampling, None, block_hasher=hasher())


@cache
def hasher() -> Any:
    """Names blocks by their tokens. The beginning is drawn once, as in an engine."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(SIZE, sha256)


def decode(cache: Any, *, lag: int) -> tuple[list[Any], list[int]]:
    """The blocks of every step, and the tokens that are found in the cache afterwards. Tokens are known `lag` steps
    after they were scheduled, as with steps in flight."""
    requests = [
        request(str(index), list(range(100 * index, 100 * index + count))) for index, count in enumerate(PROMPTS)
    ]
    blocks = []
    for each in requests:
        assert cache.allocate_slots(each, each.num_tokens, full_sequence_must_fit=True) is not None
        each.num_computed_tokens = each.num_tokens
    for step in range(RESPONSE):
        for index, each in enumerate(requests):
            if step >= lag:
                each.append_output_token_ids(1000 * index + step)
            new = cache.allocate_slots(each, 1, num_lookahead_tokens=0)
            assert new is not None
            each.num_computed_tokens += 1
            blocks.append((new.get_block_ids(), cache.get_block_ids(each.request_id)))
    hits = []
    for each in requests:
        cache.free(each)
        hits.append(cache.get_computed_blocks(request("again" + each.request_id, list(each.all_token_ids)))[1])
    return blocks, hits


@pytest.mark.parametrize("lag", [0, 1, MARGIN])
def test_the_short_way_takes_the_same_blocks(lag: int) -> None:
    asked = []
    short = manager()
    own = short.coordinator.allocate_new_blocks
    short.coordinator.allocate_new_blocks = lambda *rest: asked.append(1) or own(*rest)
    assert shorten(short, lookahead=0)
    blocks, hits = decode(short, lag=lag)
    assert (blocks, hits) == decode(manager(), lag=lag)
    assert len(asked) < len(PROMPTS) * (1 + RESPONSE * (MARGIN + 3) / SIZE)
    # All but the last block, of which the last token is computed anew.
    assert min(hits) >= min(PROMPTS) + RESPONSE - lag - 3 * SIZE


def test_other_layers_and_drafts_are_left_as_they_are() -> None:
    assert not shorten(manager(), lookahead=2)
    assert not shorten(manager(window=16), lookahead=0)


def test_vllms_own_class_is_made_for_the_configuration() -> None:
    made: list[Any] = []

    class Own:
        kv_cache_manager, num_lookahead_tokens = manager(), 0
        schedule = _preempt_request = None

        def __init__(self, **arguments: Any):
            made.append(arguments)

    config = SimpleNamespace(scheduler_cls="rlframe's", get_scheduler_cls=lambda: Own)
    vllm_config = SimpleNamespace(scheduler_config=config, additional_config={STEP_COST: 2.0})
    assert isinstance(scheduler(vllm_config=vllm_config, log_stats=False), Own)
    assert made == [{"vllm_config": vllm_config, "log_stats": False}] and config.scheduler_cls == "rlframe's"
    assert Own.kv_cache_manager.allocate_slots.__name__ == "allocate_slots"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for vLLM's configuration."""
    folder = tmp_path_factory.mktemp("model")
    make("qwen3", folder)
    return folder


def scheduling(folder: Path, *, blocks: int, second_runner: bool) -> Any:
    """vLLM's scheduler ahead of the tokens, with a cache of so many blocks."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(model=str(folder), tokenizer=str(folder), dtype="float32", max_model_len=120)
    vllm_config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
        scheduler_config=SchedulerConfig(
            max_model_len=120,
            is_encoder_decoder=False,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            async_scheduling=True,
        ),
    )
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    vllm_config.cache_config.num_gpu_blocks = blocks
    manager = StructuredOutputManager(vllm_config)
    made = AsyncScheduler(vllm_config, cache, manager, block_size=SIZE, hash_block_size=SIZE)
    made.use_v2_model_runner = second_runner
    return made


def served(made: Any, *, seed: int) -> Iterator[Any]:
    """What a scheduler decides on while requests come, end by a token or their length, are aborted, and pause."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    drawn, under_way, count, prompt = random.Random(seed), deque(), 0, [9]
    for step in range(STEPS_SERVED):
        if drawn.random() < 0.02:
            for _ in range(drawn.randint(1, 5)):
                # Some continue what a sequence before has, whose blocks are remembered.
                if made.running and drawn.random() < 0.4:
                    prompt = [*drawn.choice(made.running).all_token_ids, 9][:60]
                elif drawn.random() < 0.8:
                    prompt = [drawn.randrange(8, 60) for _ in range(drawn.randint(3, 40))]
                made.add_request(request(str(count), prompt, max_tokens=drawn.choice([5, 60, 1000])))
                count += 1
        if drawn.random() < 0.01 and made.running:
            made.finish_requests(drawn.choice(made.running).request_id, RequestStatus.FINISHED_ABORTED)
        if step % 100 == 90:
            made.set_pause_state(PauseState.PAUSED_ALL)
        if step % 100 == 94:
            made.set_pause_state(PauseState.UNPAUSED)
            made.reset_prefix_cache(reset_running_requests=step > 200)
        output = made.schedule()
        begun = {name for name in output.num_scheduled_tokens if made.requests[name].is_prefill_chunk}
        under_way.append((output, begun))
        yield output, [(each.request_id, each.num_computed_tokens, each.is_prefill_chunk) for each in made.running]
        if len(under_way) == STEPS or not output.total_num_scheduled_tokens:
            first, begun = under_way.popleft()
            names = list(first.num_scheduled_tokens)
            # A prompt that has only begun gives no token.
            tokens = [
                [] if name in begun else [7 if drawn.random() < 0.01 else drawn.randrange(8, 60)] for name in names
            ]
            places = {name: index for index, name in enumerate(names)}
            outputs = made.update_from_output(
                first, ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
            )
            yield {key: str(value.outputs) for key, value in outputs.items()}


@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("blocks", [200, 30])
def test_a_step_that_is_repeated_is_the_one_that_vllm_decides_on(
    folder: Path, blocks: int, second_runner: bool
) -> None:
    for seed in range(3):
        own = scheduling(folder, blocks=blocks, second_runner=second_runner)
        short = scheduling(folder, blocks=blocks, second_runner=second_runner)
        assert shorten(short.kv_cache_manager, lookahead=0) and Repeated.knows(short)
        decided, decide = [], short.schedule
        short.schedule = lambda *rest, decide=decide, decided=decided: decided.append(1) or decide(*rest)
        Repeated(short, Admission(short, step_cost=0)).install()
        for expected, found in zip(served(own, seed=seed), served(short, seed=seed), strict=True):
            assert found == expected
        assert STEPS_SERVED - len(decided) > 50
        free, other = (each.kv_cache_manager.block_pool.get_num_free_blocks() for each in (own, short))
        assert free == other


def responses(made: Any, requests: list[Any], *, steps: int) -> list[Any]:
    """Serves requests to their ends by a device that samples the number of a token, with so many steps under way.
    Returns the decisions."""
    from vllm.v1.outputs import ModelRunnerOutput

    known: dict[str, int] = {}
    decisions: list[Any] = []
    under_way: deque[tuple[Any, list[list[int]]]] = deque()
    for each in requests:
        made.add_request(each)
    while made.has_unfinished_requests():
        decisions.append(output := made.schedule())
        begun = {each.req_id: each for each in output.scheduled_new_reqs}
        known |= {name: len(each.prefill_token_ids) for name, each in begun.items()}
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {name: each.num_computed_tokens for name, each in begun.items()}
        ends = {name: computed[name] + count for name, count in output.num_scheduled_tokens.items()}
        tokens = [
            [end - made.requests[name].num_prompt_tokens + 100] if end >= known[name] else []
            for name, end in ends.items()
        ]
        under_way.append((output, tokens))
        if len(under_way) == steps or not output.total_num_scheduled_tokens:
            first, tokens = under_way.popleft()
            names = list(first.num_scheduled_tokens)
            places = {name: index for index, name in enumerate(names)}
            made.update_from_output(
                first, ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
            )
    return decisions


def as_026(made: Any) -> None:
    """Makes a scheduler of any release keep no account of the steps of a request that it preempts."""
    preempt = made._preempt_request

    def preempt_request(request: Any, *arguments: Any, **options: Any) -> None:
        placeholders = request.num_output_placeholders
        preempt(request, *arguments, **options)
        request.num_output_placeholders, request.num_stale_output_tokens = placeholders, 0

    made._preempt_request = preempt_request


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(("keeps_account", "step_cost"), [(False, 0.0), (True, 0.0), (False, 1.0)])
def test_preempted_requests_go_on_behind_the_tokens_of_steps_under_way(
    folder: Path, keeps_account: bool, step_cost: float, repeats: bool
) -> None:
    """With two steps under way vLLM knows all tokens when it lets a request begin anew. With three 0.26 did so before
    the last had come, sampled it again, and took both."""
    made = scheduling(folder, blocks=14, second_runner=True)
    if not keeps_account:
        as_026(made)
    admission = Admission(made, step_cost=step_cost)
    admission.install()
    if repeats:
        assert shorten(made.kv_cache_manager, lookahead=0)
        Repeated(made, admission).install()
    drawn = random.Random(0)
    lengths = {str(number): drawn.randint(20, 40) for number in range(12)}
    requests = [
        request(name, [drawn.randrange(8, 60) for _ in range(drawn.randint(3, 30))], max_tokens=length)
        for name, length in lengths.items()
    ]
    responses(made, requests, steps=STEPS)
    assert sum(each.num_preemptions for each in requests) > 5
    assert {each.request_id: list(each.output_token_ids) for each in requests} == {
        name: list(range(100, 100 + length)) for name, length in lengths.items()
    }
