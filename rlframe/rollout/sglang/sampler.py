"""rlframe's sampling rules in SGLang's sampler: a seed per request, stop tokens forbidden at first, and logprobs before
both.

SGLang's logprobs are log_softmax(logits / temperature), before top-p and top-k, and at temperature 1 for greedy
requests, which is rlframe's rule. It reads seeds only in deterministic mode, which the CPU does not have and which
gives every request without a seed the same one. Its min_new_tokens changes the logits, which would change the logprobs.
So rlframe draws the tokens itself, as the transformers engine does: with the same seeds both sample the same tokens.
"""

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlframe.rollout.base.sampling import draw, uniforms

MIN_TOKENS = "rlframe_min_tokens"
"""Key in the `custom_params` of a request."""
FIRST_POSITION = "rlframe_first_position"
"""Key in the `custom_params` of a request: how many of its input's last tokens belong to the response."""


def install(stop_tokens: list[int]) -> None:
    """Makes SGLang's sampler in this process use rlframe's rules.

    Args:
        stop_tokens: tokens that `MIN_TOKENS` forbids.
    """
    sampler: Any = importlib.import_module("sglang.srt.layers.sampler")
    batches: Any = importlib.import_module("sglang.srt.sampling.sampling_batch_info")
    # SGLang 0.5.23 returns the tokens with data for sampling masks, which rlframe never requests; 0.5.17 returns the
    # tokens only.
    captures = hasattr(sampler, "_SamplingMaskCapture")

    @cache
    def stops(device: torch.device) -> Tensor:
        # Once: a copy from the host in every step would wait for the device, which SGLang schedules ahead of.
        return torch.tensor(stop_tokens, dtype=torch.int64, device=device)

    def sample_from_probs(self: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
        tokens = sample(probs, info, positions, stop_tokens=stops(probs.device), simple=simple).to(torch.int32)
        return (tokens, None) if captures else tokens

    sampler.Sampler._sample_from_probs = sample_from_probs
    batches.SamplingBatchInfo.adjusted_from_schedule_batch = note


def note(info: Any, batch: Any, vocabulary: int) -> None:
    """Writes each request's seed, prompt length and min_tokens into the `sampling_seed` of a SamplingBatchInfo. It is
    [B, 3] instead of [B], so that SGLang filters and merges its rows with the others."""
    rows = []
    for request in batch.reqs:
        params = request.sampling_params
        own = params.custom_params or {}
        prompt_tokens = len(request.origin_input_ids) - own.get(FIRST_POSITION, 0)
        rows.append((params.sampling_seed or 0, prompt_tokens, own.get(MIN_TOKENS, 0)))
    info.sampling_seed = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).to(info.device, non_blocking=True)
    if any(min_tokens for *_, min_tokens in rows):
        # The greedy shortcut is an argmax, which would ignore forbidden tokens.
        info.is_all_greedy = False


def sample(probs: Tensor, info: Any, positions: Tensor, *, stop_tokens: Tensor, simple: bool) -> Tensor:
    """Returns [B] tokens drawn from the rows of `probs`, which stays unchanged.

    Args:
        info: a SamplingBatchInfo that `note` has prepared.
        positions: [B] position of the last token that the model has read.
        stop_tokens: [S] tokens that min_tokens forbids.
        simple: whether no row has top_k or top_p.
    """
    seeds, prompts, min_tokens = info.sampling_seed.unbind(1)
    generated = positions + 1 - prompts
    allowed = probs.float().clone()
    allowed[:, stop_tokens] *= (generated >= min_tokens)[:, None]
    uniform = uniforms(seeds, generated)
    tokens = draw(allowed, uniform)
    if simple:
        return tokens
    likely, order = allowed.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(likely.shape[-1], device=likely.device)
    likely = likely.masked_fill(ranks >= info.top_ks[:, None], 0.0)
    reached = likely.cumsum(dim=-1, dtype=torch.float64)
    # As in `sampling.keep_likely`, with a top_p for each row.
    likely = likely * (reached - likely < info.top_ps[:, None] * reached[:, -1:])
    filtered = order.gather(1, draw(likely, uniform)[:, None])[:, 0]
    # A request's tokens must not depend on whether other rows have filters: in sorted order the same number draws
    # another token.
    free = (info.top_ks >= allowed.shape[-1]) & (info.top_ps >= 1.0)
    return torch.where(free, tokens, filtered)
