"""Samplers of vLLM that report logprobs by rlframe's rule: log_softmax(logits / temperature), before top-p, top-k and
min_tokens.

vLLM offers two rules per engine: `raw_logprobs` (temperature 1) and `processed_logprobs` (after temperature, but also
after top-p, top-k and forbidden stop tokens, renormalised). rlframe's rule lies between them, and training at
temperature 0.8 shares an engine with greedy evaluation. So the engine runs with `raw_logprobs`, and the samplers here
divide each row by its own request's temperature before the log-softmax. Greedy rows (temperature 0) stay unchanged.

The tokens and logprobs of requests that have a RECORD go to a `TokenRecord`, their experts to a `RouteRecord`. vLLM
does not learn of them.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.rollout.vllm.routes import RouteRecord
from rlframe.rollout.vllm.sampling.draws import Draws
from rlframe.rollout.vllm.sampling.record import NOT_RECORDED, TokenRecord

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily (`_SAMPLING_EPS`)."""
FIRST_POSITION = "rlframe_first_position"
"""Key in the `extra_args` of a request: how many of its input's last tokens belong to the response."""
RECORD = "rlframe_record"
"""Key in the `extra_args` of a request: the name of its record. Without it the request is not recorded."""


def install(runner: Any, *, routes: RouteRecord | None = None) -> TokenRecord | None:
    """Makes the sampler of `runner`, vLLM's model runner in this process, use rlframe's rule. Returns the record that
    it writes. Returns None if the rank does not sample.

    Args:
        routes: the record of experts.
    """
    sampler = getattr(runner, "sampler", None)
    if sampler is None:
        return None
    # The object keeps its state and all references to it; only the computation of logprobs changes.
    sampler.record = TokenRecord(runner.max_num_reqs)
    sampler.routes = routes
    if hasattr(sampler, "sampling_states"):
        if routes is not None:
            follow_routes(runner, routes)
        # Its random numbers depend on a request's seed and on the position in the sequence, so that requests which
        # continue a response get the right ones.
        sampler.slots = np.tile(NOT_RECORDED, (runner.max_num_reqs, 1))
        sampler.wanted = np.zeros(runner.max_num_reqs, dtype=bool)
        sampler.__class__ = _second(type(sampler))
    else:
        sampler.runner, sampler.begun = weakref.ref(runner), {}
        draws = draws_of(runner)
        sampler.draws = draws.of if draws else no_draws
        sampler.__class__ = _first(type(sampler))
        follow_requests(runner, draws)
    return sampler.record


def draws_of(runner: Any) -> Draws | None:
    """Returns the draws of model runner V1, which its sampler then takes. None where vLLM's own generators stay: on a
    CPU, and with drafts, whose check draws by them."""
    if runner.device.type != "cuda" or runner.speculative_config is not None:
        return None
    draws, chooser = Draws(runner.device), runner.sampler.topk_topp_sampler
    chooser.forward = draws.within(chooser.forward)
    return draws


@contextmanager
def no_draws(names: Any, lengths: Any) -> Iterator[None]:  # noqa: ARG001 - as Draws.of
    """Leaves the rows to vLLM's generators."""
    yield


def option(parameters: Any, name: str) -> Any:
    """Returns an entry of the `extra_args` of a request's SamplingParams. None if there is none."""
    return ((parameters and parameters.extra_args) or {}).get(name)


def follow_requests(runner: Any, draws: Draws | None) -> None:
    """Makes model runner V1 begin the records and the draws of requests. Without draws it also starts the random
    generator of a request that continues a response where the first part has left it. Each token takes one draw."""
    update, sampler = runner._update_states, runner.sampler
    routes: RouteRecord | None = sampler.routes

    def begin(new: Any) -> None:
        if (key := option(new.sampling_params, RECORD)) is not None:
            sampler.begun[new.req_id] = sampler.record.begin(key)
            if routes is not None:
                routes.begin(new.req_id, key)
        count = option(new.sampling_params, FIRST_POSITION)
        generator = runner.requests[new.req_id].generator
        if count and generator is not None:
            advance(generator, count, draw=sampler.topk_topp_sampler, vocabulary=runner.input_batch.vocab_size)

    def update_states(scheduler_output: Any) -> Any:
        if routes is not None:
            routes.schedule(scheduler_output)
        if draws is not None:
            draws.follow(scheduler_output, lambda parameters: option(parameters, FIRST_POSITION) or 0)
        result = update(scheduler_output)
        for name in scheduler_output.finished_req_ids:
            sampler.begun.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            begin(new)
        return result

    runner._update_states = update_states


def follow_routes(runner: Any, routes: RouteRecord) -> None:
    """Makes model runner V2 begin the records of experts, before it forgets requests that have ended."""
    finish = runner.finish_requests

    def finish_requests(scheduler_output: Any) -> None:
        routes.schedule(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            if (key := option(new.sampling_params, RECORD)) is not None:
                routes.begin(new.req_id, key)
        finish(scheduler_output)

    runner.finish_requests = finish_requests


def advance(generator: torch.Generator, count: int, *, draw: Any, vocabulary: int) -> None:
    """Moves a new generator on by the draws of `count` tokens.

    Args:
        draw: vLLM's TopKTopPSampler. How many numbers it takes differs between versions and devices.
    """
    logits = torch.zeros(1, vocabulary, dtype=torch.float32, device=generator.device)
    if generator.device.type == "cuda":
        # The state is a counter, which each draw advances by the same number.
        start = generator.get_offset()
        draw(logits, {0: generator}, None, None)
        generator.set_offset(start + count * (generator.get_offset() - start))
        return
    for _ in range(count):
        draw(logits.clone(), {0: generator}, None, None)


def _first(base: Any) -> Any:
    """Returns the sampler of vLLM's model runner V1 (`vllm.v1.sample.sampler`) with rlframe's rule."""

    from vllm.v1.outputs import LogprobsTensors

    class TemperedSampler(base):
        _temperature: Tensor | None = None
        """[B] temperatures of the rows being sampled. None outside of sampling, or if all rows are greedy."""
        _is_alone = False
        """Whether the record alone wants the logprobs of the rows being sampled."""

        def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            names, lengths = first_rows(self.runner(), len(logits))
            is_recorded = bool(self.begun)
            is_alone = is_recorded and sampling_metadata.max_num_logprobs is None
            if is_alone:
                sampling_metadata = replace(sampling_metadata, max_num_logprobs=0)
            with self._sampling(sampling_metadata.temperature, is_alone), self.draws(names, lengths):
                result = super().forward(logits, sampling_metadata, *args, **kwargs)
            if is_recorded:
                record_first(self, result, names, lengths)
            if is_alone:
                result.logprobs_tensors = None
            return result

        @contextmanager
        def _sampling(self, temperature: Tensor | None, is_alone: bool) -> Iterator[None]:
            self._temperature, self._is_alone = temperature, is_alone
            try:
                yield
            finally:
                # Prompt logprobs, which `score` requests, also come through compute_logprobs, at temperature 1.
                self._temperature, self._is_alone = None, False

        def compute_logprobs(self, logits: Tensor) -> Tensor:
            if self._temperature is not None:
                divisor = torch.where(self._temperature < GREEDY_BELOW, 1.0, self._temperature)
                logits = logits.float() / divisor[:, None]
            return super().compute_logprobs(logits)

        def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
            if not self._is_alone:
                return super().gather_logprobs(logprobs, num_logprobs, token_ids)
            # The same logprobs, without the ranks of the tokens among all others.
            tokens = token_ids[:, None]
            return LogprobsTensors(tokens, logprobs.gather(1, tokens), token_ids)

    return TemperedSampler


def first_rows(runner: Any, count: int) -> tuple[list[str], Int[np.ndarray, " B"]]:
    """Returns the requests of the first rows of model runner V1, and [B] how many tokens each has sampled."""
    names = runner.input_batch.req_ids[:count]
    return names, np.array([len(runner.requests[name].output_token_ids) for name in names], dtype=np.int64)


def record_first(sampler: Any, result: Any, names: list[str], lengths: Int[np.ndarray, " B"]) -> None:
    """Records what the sampler of model runner V1 has sampled for these requests."""
    rows, owners = np.array([sampler.begun.get(name, NOT_RECORDED) for name in names]).T
    sampler.record.add(
        rows,
        owners,
        lengths,
        ~sampler.runner().discard_request_mask.np[: len(names)],
        tokens=result.logprobs_tensors.logprob_token_ids[:, 0],
        logprobs=result.logprobs_tensors.logprobs[:, 0],
    )


def _second(base: Any) -> Any:
    """Returns the sampler of vLLM's model runner V2 (`vllm.v1.worker.gpu.sample.sampler`) with rlframe's rule."""

    class TemperedSampler(base):
        def add_request(self, req_idx: int, *args: Any) -> None:
            super().add_request(req_idx, *args)
            parameters = args[-1]
            key = option(parameters, RECORD)
            self.slots[req_idx] = NOT_RECORDED if key is None else self.record.begin(key)
            self.wanted[req_idx] = parameters.logprobs is not None
            if key is not None and parameters.logprobs is None:
                # The base class then computes the logprob of the sampled token, which goes to the record alone.
                self.sampling_states.num_logprobs[req_idx] = 0

        def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._rows = input_batch.idx_mapping_np
            temperature = self.sampling_states.temperature.np[self._rows]
            if ((temperature != 0.0) & (temperature != 1.0)).any():
                # The division below is in place, and in bfloat16 it would round the input of the log-softmax.
                logits = logits.float()
            result = super().__call__(logits, input_batch, *args, **kwargs)
            if result.logprobs_tensors is not None and len(self.record):
                tokens, logprobs = result.sampled_token_ids[:, 0], result.logprobs_tensors.logprobs[:, 0]
                record_second(self, input_batch, tokens, logprobs)
                if not self.wanted[self._rows].any():
                    result.logprobs_tensors = None
            return result

        def sample(self, logits: Tensor, expanded_idx_mapping: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = self._draw(logits, expanded_idx_mapping, *args, **kwargs)
            # With raw_logprobs and a temperature other than 0 and 1 the base class has worked on a copy, and takes the
            # log-softmax of `logits` after this method. Rows of temperature 0 or 1 are left unchanged.
            if kwargs.get("return_logprobs", True):
                self.sampling_states.apply_temperature(logits, expanded_idx_mapping, self._rows)
            return result

        def _draw(self, *args: Any, **kwargs: Any) -> Any:
            return super().sample(*args, **kwargs)

    return TemperedSampler


def record_second(sampler: Any, input_batch: Any, tokens: Int[Tensor, " B"], logprobs: Float[Tensor, " B"]) -> None:
    """Records what the sampler of model runner V2 has sampled for the requests of a batch."""
    slots = input_batch.idx_mapping_np
    rows, owners = sampler.slots[slots].T
    lengths = input_batch.seq_lens_cpu_upper_bound.numpy()[: len(rows)]
    sampler.record.add(
        rows,
        owners,
        lengths - sampler.req_states.prompt_len.np[slots],
        lengths >= input_batch.prefill_len_np,
        tokens=tokens,
        logprobs=logprobs,
    )
