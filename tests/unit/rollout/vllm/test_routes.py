"""The record of experts by their places in vLLM's cache, also where a later request has taken the place."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.utils.errors import RlframeError

pytest.importorskip("vllm")
from rlframe.rollout.vllm.routes import RouteRecord, full_attention_group  # noqa: E402 - imports vLLM's cache

pytestmark = pytest.mark.engine
BLOCK = 4


def spec() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


class Worker:
    """A worker with a cache of three blocks, whose tokens go to an expert of their own."""

    def __init__(self, *, second: bool) -> None:
        """
        Args:
            second: it has model runner V2.
        """
        self.slots, self.chosen = torch.zeros(16, dtype=torch.int64), torch.zeros(16, 1, 1, dtype=torch.uint8)
        self.requests: dict[str, Any] = {}
        self.second = second
        config = SimpleNamespace(num_blocks=3, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec())])
        if second:
            self.states = SimpleNamespace(num_computed_tokens_np=np.zeros(26, dtype=np.int64), req_id_to_index={})
            tables = SimpleNamespace(slot_mappings=self.slots[None])
            runner = SimpleNamespace(kv_cache_config=config, req_states=self.states, block_tables=tables)
        else:
            table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=self.slots))
            batch = SimpleNamespace(block_table=[table])
            runner = SimpleNamespace(kv_cache_config=config, requests=self.requests, input_batch=batch)
        capture: Any = SimpleNamespace(chosen=self.chosen, shape=(1, 1), dtype=np.uint8)
        self.record = RouteRecord(capture, runner)

    def step(
        self,
        tokens: dict[str, list[int]],
        *,
        blocks: dict[str, list[int]],
        ended: Sequence[str] = (),
        resumed: Sequence[str] = (),
    ) -> None:
        """Computes tokens, given by their positions, of some requests."""
        count = sum(map(len, tokens.values()))
        new = [name for name in tokens if name not in self.requests]
        preempted = (self.requests.keys() - tokens.keys() - {*ended}) | {*resumed}
        if self.second:
            # It forgets those that are preempted, which come back as new requests.
            new = [name for name in tokens if name not in self.requests or name in preempted]
        old = {name: len(self.requests[name].block_ids[0]) for name in tokens if name not in new}
        self.record.schedule(
            SimpleNamespace(
                num_scheduled_tokens={name: len(positions) for name, positions in tokens.items()},
                total_num_scheduled_tokens=count,
                finished_req_ids=ended,
                preempted_req_ids=preempted if self.second else None,
                scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(blocks[name],)) for name in new],
                scheduled_cached_reqs=SimpleNamespace(
                    resumed_req_ids=set() if self.second else set(resumed),
                    req_ids=list(old),
                    new_block_ids=[(more,) if (more := blocks[name][had:]) else None for name, had in old.items()],
                ),
            )
        )
        for name in {*ended, *(preempted if self.second else ())}:
            self.requests.pop(name, None)
        places = []
        for name, positions in tokens.items():
            if name in new:
                self.record.begin(name, f"record of {name}")
            self.requests[name] = SimpleNamespace(block_ids=(blocks[name],), num_computed_tokens=positions[0])
            places += [blocks[name][position // BLOCK] * BLOCK + position % BLOCK for position in positions]
            if self.second:
                at = self.states.req_id_to_index.setdefault(name, len(self.states.req_id_to_index))
                self.states.num_computed_tokens_np[at] = positions[0]
        self.slots[:count] = torch.tensor(places, dtype=torch.int64)
        self.chosen[:count, 0, 0] = torch.tensor([self.number(name, at) for name in tokens for at in tokens[name]])

    @staticmethod
    def number(name: str, position: int) -> int:
        return 50 * (ord(name) - ord("a")) + position

    def expected(self, name: str, count: int) -> list[int]:
        return [self.number(name, position) for position in range(count)]

    def taken(self, name: str, count: int) -> list[int]:
        return self.record.take(f"record of {name}", count).ravel().tolist()


@pytest.fixture(params=["V1", "V2"])
def worker(request: pytest.FixtureRequest) -> Worker:
    """A worker with each of vLLM's model runners."""
    return Worker(second=request.param == "V2")


def test_a_request_has_its_experts_though_another_one_has_its_place_since(worker: Worker) -> None:
    worker.step({"a": [0, 1, 2], "b": [0]}, blocks={"a": [2], "b": [0]})
    worker.step({"a": [3], "b": [1]}, blocks={"a": [2], "b": [0]})
    worker.step({"a": [4]}, blocks={"a": [2, 1]}, ended=["b"])
    # In the blocks of both; the last one has the token of a step whose request had ended already.
    worker.step({"c": [0, 1, 2, 3, 4]}, blocks={"c": [0, 2]}, ended=["a"])
    assert worker.taken("a", 5) == worker.expected("a", 5)
    assert worker.taken("b", 2) == worker.expected("b", 2)
    # The worker has not been told of its end.
    assert worker.taken("c", 5) == worker.expected("c", 5)
    assert worker.taken("c", 5) == []


def test_a_request_that_ends_while_it_is_preempted_has_its_own_experts(worker: Worker) -> None:
    worker.step({"a": [0, 1, 2, 3, 4], "b": [0]}, blocks={"a": [0, 1], "b": [2]})
    # One step gives the blocks of `a` to others, whose own ends while they are in the batch.
    worker.step({"b": [1, 2, 3, 4, 5]}, blocks={"b": [2, 0]})
    worker.step({"b": [6], "c": [0, 1]}, blocks={"b": [2, 0], "c": [1]})
    assert worker.taken("b", 7) == worker.expected("b", 7)
    worker.step({"c": [2]}, blocks={"c": [1]}, ended=["a"])
    assert worker.taken("a", 5) == worker.expected("a", 5)
    assert worker.taken("c", 3) == worker.expected("c", 3)


def test_a_request_whose_end_the_worker_was_not_told_has_its_own_experts_too(worker: Worker) -> None:
    worker.step({"a": [0, 1]}, blocks={"a": [0]})
    worker.step({"b": [0, 1]}, blocks={"b": [0]})
    assert worker.taken("a", 2) == worker.expected("a", 2)
    worker.step({"b": [2]}, blocks={"b": [0]}, ended=["a"])
    assert worker.taken("b", 3) == worker.expected("b", 3)


def preempt(worker: Worker, *, computed: Sequence[int]) -> None:
    """Makes `a` compute 6 tokens and preempts it. An emptied cache is given back at once; then `a` has computed some of
    them again, in other blocks."""
    worker.step({"a": [0, 1, 2, 3, 4]}, blocks={"a": [0, 1]})
    worker.step({"a": [5]}, blocks={"a": [0, 1]})
    worker.step({"a": list(computed)}, blocks={"a": [2, 0]}, resumed=["a"])


@pytest.mark.parametrize("ended", [["a"], []])
def test_a_request_that_ends_before_all_is_computed_again_has_its_experts(worker: Worker, ended: list[str]) -> None:
    preempt(worker, computed=[0, 1, 2])
    if ended:
        worker.step({}, blocks={}, ended=ended)
    assert worker.taken("a", 6) == worker.expected("a", 6)


def test_a_request_that_was_preempted_twice_has_its_experts(worker: Worker) -> None:
    preempt(worker, computed=[0, 1, 2])
    worker.step({"b": [0, 1, 2, 3, 4]}, blocks={"b": [2, 0]})
    worker.step({"b": [5]}, blocks={"b": [2, 0]}, ended=["a"])
    assert worker.taken("a", 6) == worker.expected("a", 6)


def test_a_request_that_goes_on_has_the_experts_of_its_new_places(worker: Worker) -> None:
    preempt(worker, computed=[0, 1, 2, 3, 4, 5])
    worker.step({"a": [6], "b": [0]}, blocks={"a": [2, 0], "b": [1]})
    worker.step({"b": [1]}, blocks={"b": [1]}, ended=["a"])
    assert worker.taken("a", 7) == worker.expected("a", 7)


def test_a_record_that_nobody_wants_is_forgotten(worker: Worker) -> None:
    worker.step({"a": [0]}, blocks={"a": [0]})
    worker.step({}, blocks={}, ended=["a"])
    assert worker.taken("a", 0) == [] == worker.taken("a", 1)


def test_a_cache_that_drops_tokens_is_refused() -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8)
    groups = [SimpleNamespace(kv_cache_spec=each) for each in (window, spec())]
    assert full_attention_group(groups) == (1, BLOCK)
    with pytest.raises(RlframeError, match=r"no layer of vLLM's cache holds all tokens of a request"):
        full_attention_group(groups[:1])
