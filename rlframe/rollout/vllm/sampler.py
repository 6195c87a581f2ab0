"""Samplers of vLLM that report logprobs by rlframe's rule: log_softmax(logits / temperature), before top-p, top-k and
min_tokens.

vLLM offers two rules per engine: `raw_logprobs` (temperature 1) and `processed_logprobs` (after temperature, but also
after top-p, top-k and forbidden stop tokens, renormalised). rlframe's rule lies between them, and training at
temperature 0.8 shares an engine with greedy evaluation. So the engine runs with `raw_logprobs`, and the samplers here
divide each row by its own request's temperature before the log-softmax. Greedy rows (temperature 0) stay unchanged.
"""

from typing import Any

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily (`_SAMPLING_EPS`)."""
FIRST_POSITION = "rlframe_first_position"
"""Key in the `extra_args` of a request: how many of its input's last tokens belong to the response."""


def install(runner: Any) -> None:
    """Makes the sampler of `runner`, vLLM's model runner in this process, use rlframe's rule. Does nothing if the rank
    does not sample."""
    sampler = getattr(runner, "sampler", None)
    if sampler is None:
        return
    # The object keeps its state and all references to it; only the computation of logprobs changes.
    if hasattr(sampler, "sampling_states"):
        # Its random numbers depend on a request's seed and on the position in the sequence, so that requests which
        # continue a response get the right ones.
        sampler.__class__ = _second(type(sampler))
    else:
        sampler.__class__ = _first(type(sampler))
        continue_generators(runner)


def continue_generators(runner: Any) -> None:
    """Makes model runner V1 start the random generator of a request that continues a response where the first part has
    left it. Each token takes one draw."""
    update = runner._update_states

    def update_states(scheduler_output: Any) -> Any:
        result = update(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            count = ((new.sampling_params and new.sampling_params.extra_args) or {}).get(FIRST_POSITION, 0)
            generator = runner.requests[new.req_id].generator
            if count and generator is not None:
                vocabulary = runner.input_batch.vocab_size
                advance(generator, count, draw=runner.sampler.topk_topp_sampler, vocabulary=vocabulary)
        return result

    runner._update_states = update_states


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

    class TemperedSampler(base):
        _temperature: Tensor | None = None
        """[B] temperatures of the rows being sampled. None outside of sampling, or if all rows are greedy."""

        def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            self._temperature = sampling_metadata.temperature
            try:
                return super().forward(logits, sampling_metadata, *args, **kwargs)
            finally:
                # Prompt logprobs, which `score` requests, also come through compute_logprobs, at temperature 1.
                self._temperature = None

        def compute_logprobs(self, logits: Tensor) -> Tensor:
            if self._temperature is not None:
                divisor = torch.where(self._temperature < GREEDY_BELOW, 1.0, self._temperature)
                logits = logits.float() / divisor[:, None]
            return super().compute_logprobs(logits)

    return TemperedSampler


def _second(base: Any) -> Any:
    """Returns the sampler of vLLM's model runner V2 (`vllm.v1.worker.gpu.sample.sampler`) with rlframe's rule."""

    class TemperedSampler(base):
        def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._rows = input_batch.idx_mapping_np
            temperature = self.sampling_states.temperature.np[self._rows]
            if ((temperature != 0.0) & (temperature != 1.0)).any():
                # The division below is in place, and in bfloat16 it would round the input of the log-softmax.
                logits = logits.float()
            return super().__call__(logits, input_batch, *args, **kwargs)

        def sample(self, logits: Tensor, expanded_idx_mapping: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = super().sample(logits, expanded_idx_mapping, *args, **kwargs)
            # With raw_logprobs and a temperature other than 0 and 1 the base class has worked on a copy, and takes the
            # log-softmax of `logits` after this method. Rows of temperature 0 or 1 are left unchanged.
            if kwargs.get("return_logprobs", True):
                self.sampling_states.apply_temperature(logits, expanded_idx_mapping, self._rows)
            return result

    return TemperedSampler
