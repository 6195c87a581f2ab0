"""The short way of the scheduler against vLLM's own cache manager: the same blocks, and the same hits afterwards."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframe.rollout.vllm.scheduler import MARGIN, scheduler, shorten

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

SIZE, PROMPTS, RESPONSE = 8, (21, 16, 40), 50


def manager(*, window: int | None = None) -> Any:
    """vLLM's manager of a cache of 200 blocks."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    config = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=200, scheduler_block_size=SIZE, hash_block_size=SIZE)


def request(name: str, tokens: list[int]) -> Any:
    """vLLM's request."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=RESPONSE), None, block_hasher=hasher)


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

        def __init__(self, **arguments: Any):
            made.append(arguments)

    config = SimpleNamespace(scheduler_cls="rlframe's", get_scheduler_cls=lambda: Own)
    vllm_config = SimpleNamespace(scheduler_config=config)
    assert isinstance(scheduler(vllm_config=vllm_config, log_stats=False), Own)
    assert made == [{"vllm_config": vllm_config, "log_stats": False}] and config.scheduler_cls == "rlframe's"
    assert Own.kv_cache_manager.allocate_slots.__name__ == "allocate_slots"
