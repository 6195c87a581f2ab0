"""Logprobs and their gradient from logits on a GPU, each in one pass over memory (Triton).

torch's operations on float32 chunks move about 60 bytes for each bfloat16 logit; these kernels move 2 forward and 4
backward, which is the minimum: at 16,384 tokens and 151,936 columns 5.0 and 10.0 GB, 1.2 and 2.4 ms on an H200.
`vocab_parallel` defines the computation; the two functions here correspond to its functions of the same names.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Number of columns that one program holds in registers at once."""
LOWEST = tl.constexpr(-1e30)
"""Stands for minus infinity where two of them are subtracted: 0 times it is 0, and its exp is 0."""


@triton.jit(do_not_specialize=["num_tokens"])
def _statistics(
    logits, targets, out, row_stride, num_tokens, start, valid, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    """Computes for one row: peak, sum exp(x - peak), sum exp(x - peak) (x - peak) and the target's x, updated as the
    peak rises."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    peak = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, valid, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < valid
        value = tl.load(base + col, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        value = tl.where(inside, value, LOWEST)
        higher = tl.maximum(peak, tl.max(value, 0))
        drop = peak - higher
        scale = tl.exp(drop)
        distance = value - higher
        weight = tl.exp(distance)
        weighted = scale * (weighted + drop * total) + tl.sum(weight * distance, 0)
        total = scale * total + tl.sum(weight, 0)
        peak = higher
    target = tl.load(targets + row) - start
    here = (target >= 0) & (target < valid)
    chosen = tl.load(base + target, mask=here, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(out + row, peak)
    tl.store(out + num_tokens + row, total)
    tl.store(out + 2 * num_tokens + row, weighted)
    tl.store(out + 3 * num_tokens + row, chosen)


@triton.jit
def _gradient(
    logits, targets, log_normalizer, entropy, grad_logprobs, grad_entropy, out, row_stride, out_stride, start, valid,
    width, inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one row of the gradient; padding gets 0. `out` may be `logits`: a block is read before it is written."""
    row = tl.program_id(0).to(tl.int64)
    normalizer = tl.load(log_normalizer + row)
    of_logprob = tl.load(grad_logprobs + row)
    target = tl.load(targets + row) - start
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * row_stride + col, mask=col < valid, other=0.0).to(tl.float32)
        logp = value * inverse_temperature - normalizer
        slope = of_logprob
        if WITH_ENTROPY:
            slope = of_logprob + tl.load(grad_entropy + row) * (logp + tl.load(entropy + row))
        grad = tl.where(col == target, of_logprob, 0.0) - tl.exp(logp) * slope
        grad = tl.where(col < valid, grad * inverse_temperature, 0.0)
        tl.store(out + row * out_stride + col, grad.to(out.dtype.element_ty), mask=col < width)


def statistics(logits: Tensor, targets: Tensor, temperature: float, start: int, valid: int) -> Tensor:
    """See `vocab_parallel.statistics`."""
    num_tokens = logits.shape[0]
    out = torch.empty(4, num_tokens, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _statistics[(num_tokens,)](
            logits, targets, out, logits.stride(0), num_tokens, start, valid, 1 / temperature, BLOCK=BLOCK, num_warps=8
        )
    return out


def gradient(
    logits: Tensor,
    targets: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
    temperature: float,
    start: int,
    valid: int,
) -> None:
    """See `vocab_parallel.gradient`."""
    num_tokens, width = logits.shape
    if num_tokens:
        _gradient[(num_tokens,)](
            logits, targets, log_normalizer, entropy, grad_logprobs.contiguous(),
            entropy if grad_entropy is None else grad_entropy.contiguous(), out, logits.stride(0), out.stride(0), start,
            valid, width, 1 / temperature, WITH_ENTROPY=grad_entropy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
