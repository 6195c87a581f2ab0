"""The experts that vLLM's routers choose, inside vLLM's worker: by the place of each token in the key-value cache.

vLLM's own way (`enable_return_routed_experts`) copies the experts of every token of every step from process to process,
an array for each request and token. Here they stay in the worker, and the engine fetches those of a request once, when
it has ended. Tokens that share keys and values share their experts too, so that a cached prompt has them.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from rlframe.rollout.base.routes import Routers
from rlframe.utils.errors import RlframeError

CAPTURE = "rlframe_routes"
"""Attribute of the loaded model that holds its `RouteCapture`."""
Rows = Shaped[np.ndarray, "rows layers k"]


class RouteCapture:
    """Notes what the routers of a model choose in a step. It must be there before the model first runs, because CUDA
    graphs hold its copies."""

    def __init__(self, model: Any, routers: Routers, *, num_tokens: int):
        """
        Args:
            model: vLLM's model.
            num_tokens: greatest number of tokens of a step.

        Raises:
            RlframeError: the routers cannot be asked.
        """
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self.num_tokens = num_tokens
        self.shape = (routers.num_layers, routers.experts_per_token)
        """Layers and k."""
        self.dtype = routers.dtype
        self.chosen: Int[Tensor, "N layers k"] | None = None
        """Experts of the step's tokens. Further rows are of earlier steps."""
        modules = [module for module in model.modules() if isinstance(module, MoERunner)]
        for module in modules:
            inside = getattr(getattr(module, "_quant_method", None), "is_monolithic", False)
            if inside or not isinstance(module.router, BaseRouter):
                kernel = "kernel, which routes inside" if inside else f"router {type(module.router).__name__}"
                raise RlframeError(
                    f"vLLM's {kernel}, does not say which experts it chooses; set train.moe.router_replay=false"
                )
            module.router.set_capture_fn(partial(self._note, module.layer_id))
        if len(modules) != len(routers.layers):
            raise RlframeError(
                f"expected {len(routers.layers)} layers with experts in vLLM's model, got {len(modules)}; "
                "set train.moe.router_replay=false"
            )

    def _note(self, layer: int, experts: Int[Tensor, "N k"]) -> None:
        if self.chosen is None:
            # Not while the model is loaded, whose memory vLLM gives back when it sleeps; but before graphs, in vLLM's
            # first run of the model.
            dtype = torch.uint8 if self.dtype is np.uint8 else torch.int16
            self.chosen = torch.zeros((self.num_tokens, *self.shape), dtype=dtype, device=experts.device)
        self.chosen[: len(experts), layer] = experts


@dataclass(frozen=True, slots=True)
class Step:
    """The experts of one step, which may still be on their way from the device."""

    slots: Int[Tensor, " N"]
    chosen: Int[Tensor, "N layers k"]
    arrived: torch.cuda.Event | None
    """None if the tensors never were on a device."""


@dataclass(frozen=True, slots=True)
class Place:
    """The blocks of the cache that a request has had until now. Later steps may write them again."""

    key: str
    blocks: list[int]


class FirstBatch:
    """The requests and the tokens of the last step in vLLM's model runner V1."""

    def __init__(self, runner: Any, group: int):
        """
        Args:
            group: index of the layers' group in vLLM's cache.
        """
        self._runner, self._group = runner, group

    def schedule(self, scheduler_output: Any) -> None:
        """Takes note of what the next step computes. Must be called before the runner does."""

    def slots(self, num_tokens: int) -> Int[Tensor, " N"]:
        """Returns [N] the places of the step's tokens in the cache."""
        return self._runner.input_batch.block_table[self._group].slot_mapping.gpu[:num_tokens]

    def num_computed(self, name: str) -> int:
        """Returns the number of tokens that a request had computed before the step."""
        return self._runner.requests[name].num_computed_tokens

    def blocks(self, name: str) -> list[int]:
        """Returns the blocks of a request."""
        return list(self._runner.requests[name].block_ids[self._group])


class SecondBatch(FirstBatch):
    """The same in model runner V2, which has the blocks on the device alone."""

    def __init__(self, runner: Any, group: int):
        super().__init__(runner, group)
        self._blocks: dict[str, list[int]] = {}

    def schedule(self, scheduler_output: Any) -> None:
        # A request that was preempted comes as a new one.
        for name in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self._blocks.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[self._group])
        known = scheduler_output.scheduled_cached_reqs
        for name, more in zip(known.req_ids, known.new_block_ids, strict=True):
            if more is not None:
                self._blocks[name] += more[self._group]

    def slots(self, num_tokens: int) -> Int[Tensor, " N"]:
        return self._runner.block_tables.slot_mappings[self._group, :num_tokens]

    def num_computed(self, name: str) -> int:
        states = self._runner.req_states
        return int(states.num_computed_tokens_np[states.req_id_to_index[name]])

    def blocks(self, name: str) -> list[int]:
        return self._blocks[name].copy()


class RouteRecord:
    """The experts of all tokens in the key-value cache, in host memory."""

    def __init__(self, capture: RouteCapture, runner: Any):
        """
        Args:
            runner: vLLM's model runner in this process.
        """
        self._capture = capture
        group, block_size = full_attention_group(runner.kv_cache_config.kv_cache_groups)
        self._batch = (SecondBatch if hasattr(runner, "req_states") else FirstBatch)(runner, group)
        # Pages that no token has been in take no memory.
        self._cache = np.zeros((runner.kv_cache_config.num_blocks, block_size, *capture.shape), dtype=capture.dtype)
        self._flat = self._cache.reshape(-1, *capture.shape)
        self._keys: dict[str, str] = {}
        """Names of records by vLLM's name of a running request."""
        self._kept: dict[str, Rows] = {}
        """Experts of requests that have ended or left the batch, by the names of their records."""
        self._left: dict[str, int] = {}
        """Number of tokens of a request whose experts were there when it last left the batch, by vLLM's name of it."""
        self._waiting: deque[Step | Place] = deque()
        self._scheduled: Mapping[str, int] = {}
        """Tokens of each request in the last step, by vLLM's name of it."""
        self._num_tokens = 0
        """Tokens of the last step, while its experts are not in `_waiting` yet."""

    def schedule(self, scheduler_output: Any) -> None:
        """Records the tokens of the last step, and notes the places of requests that have ended or leave the batch. The
        device does not wait for it. Must be called before vLLM forgets those requests and prepares the next step.

        Args:
            scheduler_output: what the next step computes.
        """
        self._add()
        self._num_tokens = scheduler_output.total_num_scheduled_tokens
        for name in scheduler_output.finished_req_ids:
            self._end(name)
        # vLLM may have given the blocks of these to others in this step, and they may end before they come back. Not
        # `preempted_req_ids`, which vLLM 0.26 and 0.32 have for model runner V2. What an emptied cache has preempted
        # may be back at once, with V2 as a new request.
        before, now = self._scheduled.keys(), scheduler_output.num_scheduled_tokens.keys()
        back = {*scheduler_output.scheduled_cached_reqs.resumed_req_ids}
        back |= {new.req_id for new in scheduler_output.scheduled_new_reqs}
        for name in (before - now) | (before & back):
            self._keep(name)
        self._scheduled = scheduler_output.num_scheduled_tokens
        self._batch.schedule(scheduler_output)
        self._read_arrived()

    def begin(self, name: str, key: str) -> None:
        """Begins the record `key` of vLLM's request `name`."""
        self._keys[name] = key

    def take(self, key: str, num_rows: int) -> Rows:
        """Returns the experts of the first `num_rows` tokens of a request, and ends its record."""
        self._add()
        # vLLM tells the worker of an end with the next step only.
        name = next((name for name, each in self._keys.items() if each == key), None)
        if name is not None:
            self._end(name)
        while self._waiting:
            self._read(self._waiting.popleft())
        return self._kept.pop(key, self._flat[:0])[:num_rows].copy()

    def _end(self, name: str) -> None:
        """Ends the record of a request, if it has one."""
        self._keep(name)
        self._keys.pop(name, None)
        self._left.pop(name, None)

    def _keep(self, name: str) -> None:
        """Notes the place of the experts of a request that has a record. It has none outside of the batch, nor before
        what it had lost there is computed again; what was kept when it left then stays."""
        if name not in self._keys or name not in self._scheduled:
            return
        num_rows = self._batch.num_computed(name) + self._scheduled[name]
        if num_rows >= self._left.get(name, 0):
            self._left[name] = num_rows
            self._waiting.append(Place(self._keys[name], self._batch.blocks(name)))

    def _add(self) -> None:
        chosen = self._capture.chosen
        if not self._num_tokens or chosen is None:
            return
        slots = self._batch.slots(self._num_tokens)
        chosen, arrived = chosen[: self._num_tokens], None
        self._num_tokens = 0
        if chosen.is_cuda:
            slots, chosen = (each.to("cpu", non_blocking=True) for each in (slots, chosen))
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            # The next step writes into the same memory.
            slots, chosen = slots.clone(), chosen.clone()
        self._waiting.append(Step(slots, chosen, arrived))

    def _read_arrived(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Step) and first.arrived is not None and not first.arrived.query():
                return
            self._read(self._waiting.popleft())

    def _read(self, entry: Step | Place) -> None:
        if isinstance(entry, Place):
            self._kept[entry.key] = self._cache[entry.blocks].reshape(-1, *self._cache.shape[2:])
            return
        if entry.arrived is not None:
            entry.arrived.synchronize()
        self._flat[entry.slots.numpy()] = entry.chosen.numpy()


def full_attention_group(groups: Any) -> tuple[int, int]:
    """Returns the index and the tokens of a block of the group of layers whose cache holds every token of a request.

    Raises:
        RlframeError: there is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def specs(group: Any) -> Iterator[Any]:
        # Layers with keys of different sizes have a spec each.
        yield from getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()

    for index, group in enumerate(groups):
        if all(isinstance(each, FullAttentionSpec) for each in specs(group)):
            return index, group.kv_cache_spec.block_size
    raise RlframeError(
        "no layer of vLLM's cache holds all tokens of a request, by whose places routed experts are known; "
        "set train.moe.router_replay=false"
    )
