"""Estimators of KL(policy || reference) from the tokens the policy sampled."""

from enum import StrEnum

from jaxtyping import Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp() is taken of log-ratios up to this, so that one token cannot make the loss infinite."""


class KlEstimator(StrEnum):
    """Names after Schulman 2020, joschu.net/blog/kl-approx.html, with d = log policy - log reference."""

    K1 = "k1"
    """d: unbiased, high variance, may be negative."""
    K2 = "k2"
    """d^2 / 2: biased, low variance; as a loss its on-policy gradient is that of the KL."""
    K3 = "k3"
    """exp(-d) + d - 1: unbiased, low variance, never negative."""


def kl_per_token(
    logprobs: Float[Tensor, " T"], reference_logprobs: Float[Tensor, " T"], estimator: KlEstimator
) -> Float[Tensor, " T"]:
    """[T] nats: the estimator at each token. Gradient flows through `logprobs` only."""
    d = logprobs - reference_logprobs
    if estimator is KlEstimator.K1:
        return d
    if estimator is KlEstimator.K2:
        return d.square() / 2
    # Both terms are clamped: without its exponential, d alone would push the policy further from the reference.
    d = d.clamp(min=-MAX_LOG_RATIO)
    return (-d).exp() + d - 1
