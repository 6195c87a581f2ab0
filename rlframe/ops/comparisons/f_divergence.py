"""Scores of responses under divergences from the reference other than the reverse KL.

Source: Wang et al. 2023, arXiv 2309.16240, theorem 1 and table 1: where the policy is held to the reference by the
divergence of a function f, a response's reward is beta f'(u) with u = policy / reference, so that DPO's log u becomes
f'(u). Constants are chosen so that f'(1) = 0, as in TRL; the paper's forward KL lacks the 1, which cancels in a pair.
"""

import math
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

LARGEST_EXPONENT = 80.0
"""Greatest exponent in nats, beyond which float32 overflows. The gradient beyond is 0. TRL limits those of `alpha` and
not those of `forward_kl`."""


class FDivergence(StrEnum):
    """Divergences by their f'(u), with r = log u."""

    REVERSE_KL = "reverse_kl"
    """r: DPO."""
    FORWARD_KL = "forward_kl"
    """1 - exp(-r)."""
    JS = "js"
    """log 2 + log sigmoid(r); TRL's `js_divergence`."""
    ALPHA = "alpha"
    """(1 - exp(-alpha r)) / alpha, alpha in (0, 1): towards 0 the reverse KL, towards 1 the forward KL. TRL's
    `f_alpha_divergence_coef` is 1 - alpha."""


def scores(ratios: Float[Tensor, " N"], divergence: FDivergence, *, alpha: float) -> Float[Tensor, " N"]:
    """Returns [N] f'(u) of each response, from r = log u in nats."""
    if divergence is FDivergence.REVERSE_KL:
        return ratios
    if divergence is FDivergence.JS:
        return math.log(2) + logsigmoid(ratios)
    power = 1.0 if divergence is FDivergence.FORWARD_KL else alpha
    return -torch.expm1((-power * ratios).clamp(max=LARGEST_EXPONENT)) / power
