"""Draws the next tokens of all requests by one kernel, each by its request's seed and its place in the response.

vLLM's model runner V1 (0.26 to 0.32) has a random generator for each request with a seed, and starts a kernel for each
of them in every step: 512 kernels for 512 requests. Here a random number depends on the seed, the place and the token
alone (Philox, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so that a response that is continued
goes on as it would have. The greatest of logits + Gumbel noise is a draw of softmax(logits). This file can go with
model runner V1: V2 draws in such a way itself.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

LANES = 512
"""Tokens of a quarter of a block: each Philox call gives four numbers."""
BLOCKS = 4
"""Blocks of a program, one after the other: 8,192 tokens."""
WARPS = 4


def draw(logits: Float[Tensor, "B V"], seeds: Int[Tensor, " B"], places: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Returns [B] a draw of softmax(logits) for each row. It does not depend on the other rows.

    Args:
        logits: float32. Tokens of minus infinity are never drawn.
        seeds: int64.
        places: int64, below 2^32: equal seeds with other places give independent draws.
    """
    count, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, 4 * LANES * BLOCKS)
    best, tokens = logits.new_empty(count, parts), seeds.new_empty(count, parts)
    _best[(count, parts)](
        logits,
        logits.stride(0),
        seeds,
        places,
        best,
        tokens,
        parts,
        vocabulary,
        LANES=LANES,
        BLOCKS=BLOCKS,
        num_warps=WARPS,
    )
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]


@triton.jit(do_not_specialize=["parts"])
def _best(
    logits,
    stride,
    seeds,
    places,
    best,
    tokens,
    parts,
    vocabulary,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Finds the greatest sum of a part of a row, and its token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, place = tl.load(seeds + row), tl.load(places + row).to(tl.uint32)
    lanes = tl.arange(0, LANES)
    none = (lanes * 0).to(tl.uint32)
    greatest = tl.full((LANES,), float("-inf"), tl.float32)
    found = lanes * 0
    begin = part * BLOCKS
    for block in range(begin, tl.minimum(begin + BLOCKS, tl.cdiv(vocabulary, 4 * LANES))):
        counter = (block * LANES + lanes).to(tl.uint32)
        first, second, third, fourth = tl.philox(seed, counter, none + place, none, none)
        base = block * 4 * LANES + lanes
        for quarter in tl.static_range(4):
            bits = first if quarter == 0 else second if quarter == 1 else third if quarter == 2 else fourth
            token = base + quarter * LANES
            inside = token < vocabulary
            logit = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
            total = tl.where(inside, logit - tl.log(exponential(bits)), float("-inf"))
            better = total > greatest
            greatest = tl.where(better, total, greatest)
            found = tl.where(better, token, found)
    lane = tl.argmax(greatest, 0)
    tl.store(best + row * parts + part, tl.max(greatest, 0))
    tl.store(tokens + row * parts + part, tl.sum(tl.where(lanes == lane, found, 0), 0).to(tl.int64))


@triton.jit
def exponential(bits):
    """Returns exponentially distributed numbers, the small ones as fine as float32 has them: they decide."""
    # The middles of 2^31 intervals.
    uniform = tl.uint_to_uniform_float(bits) + 2.3283064e-10
    # -log(1 - u), whose argument would be rounded where u is small.
    series = uniform * (1 + uniform * (0.5 + uniform * (0.33333333 + uniform * 0.25)))
    return tl.where(uniform < 0.01, series, -tl.log(1 - uniform))
