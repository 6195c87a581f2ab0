"""Reproducible sampling: a request's tokens depend on its seed and position, never on its batch.

Only float rounding remains: a matrix product of another batch size may differ in its last bits. A logit then differs,
and with it a draw that falls within that difference of a boundary.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from rlframe.types.rollout import SamplingParams

ONE_BLOCK = 2048
"""Most tokens whose cumulative probabilities are all computed. Those of 49,152 tokens took a core 8.0 ms for 16 rows,
and 0.2 by blocks; of 151,936 for 32 rows 55 and 1.7 (an EPYC of 2025, by hand)."""
# The constants of splitmix64 as signed 64-bit numbers: torch multiplies in int64 and wraps around.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
MULTIPLY_FIRST = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLY_SECOND = 0x94D049BB133111EB - 2**64


def splitmix64(seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Returns [B] 64 random bits: output number `position` (from 0) of the splitmix64 generator seeded with `seed`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), and Vigna's splitmix64.c.
    """
    bits = seeds + (positions + 1) * GAMMA
    bits = (bits ^ _shift_right(bits, 30)) * MULTIPLY_FIRST
    bits = (bits ^ _shift_right(bits, 27)) * MULTIPLY_SECOND
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Int[Tensor, " B"], count: int) -> Int[Tensor, " B"]:
    # Logical shift: int64's own >> drags the sign bit along.
    return (bits >> count) & ((1 << (64 - count)) - 1)


def uniforms(seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Returns [B] float64 in [0, 1), one for each (seed, position)."""
    return _shift_right(splitmix64(seeds, positions), 11).double() * 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token for each row."""

    tokens: Int[Tensor, " B"]
    """[B] int64."""
    logprobs: Float[Tensor, " B"]
    """[B] nats, float32, under the whole distribution: nothing filtered, no stop token forbidden."""


def sample(
    logits: Float[Tensor, "B V"],
    *,
    sampling: SamplingParams,
    uniform: Float[Tensor, " B"],
    forbidden: Bool[Tensor, "B V"] | None = None,
) -> Sampled:
    """Samples one token for each row by inverting the cumulative distribution at `uniform`.

    Args:
        uniform: in [0, 1); not used by greedy sampling.
        forbidden: tokens that must not be drawn. The reported logprobs remain those of the whole distribution, which is
            what the trainer computes.
    """
    logits = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    allowed = logprobs if forbidden is None else logprobs.masked_fill(forbidden, -torch.inf)
    if sampling.temperature == 0.0:
        tokens = allowed.argmax(dim=-1)
    elif sampling.top_k or sampling.top_p < 1.0:
        probabilities, order = allowed.exp().sort(dim=-1, descending=True, stable=True)
        places = draw(keep_likely(probabilities, top_k=sampling.top_k, top_p=sampling.top_p), uniform)
        tokens = order.gather(1, places[:, None])[:, 0]
    else:
        tokens = draw(allowed.exp(), uniform)
    return Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0])


def keep_likely(probabilities: Float[Tensor, "B V"], *, top_k: int, top_p: float) -> Float[Tensor, "B V"]:
    """Returns [B, V] the probabilities with the filtered ones set to 0: first `top_k`, then `top_p` of the remaining
    sum.

    Args:
        probabilities: each row in falling order; need not add up to 1.
    """
    if 0 < top_k < probabilities.shape[-1]:
        probabilities = probabilities.clone()
        probabilities[:, top_k:] = 0.0
    if top_p < 1.0:
        reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
        # A token stays if those before it have not reached top_p yet, so the most likely token always stays.
        probabilities = probabilities * (reached - probabilities < top_p * reached[:, -1:])
    return probabilities


def draw(probabilities: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Returns [B] the first index whose cumulative probability exceeds `uniform` times the row's sum. An index of
    probability 0 is never returned.

    Above ONE_BLOCK tokens a block of them is found first, by the sums of blocks in float32, and then the token in it.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary <= ONE_BLOCK:
        reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
        return _first_above(uniform[:, None] * reached[:, -1:], reached)[:, 0]
    width = math.isqrt(vocabulary)
    blocks = F.pad(probabilities, (0, -vocabulary % width)).unflatten(1, (-1, width))
    reached = blocks.sum(-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * reached[:, -1:]
    block = _first_above(target, reached)
    before = reached.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    within = blocks[torch.arange(rows, device=blocks.device), block[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    return (block * width + _first_above(target - before, within))[:, 0]


def _first_above(target: Float[Tensor, "B 1"], reached: Float[Tensor, "B N"]) -> Int[Tensor, "B 1"]:
    """Returns [B, 1] the first index at which a cumulative sum exceeds the target."""
    # Rounding can lift the target to the sum itself; then the largest float below the sum selects the last real token.
    last = reached[:, -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(reached, target, right=True)
