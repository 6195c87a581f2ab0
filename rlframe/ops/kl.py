"""Estimators of KL(policy || reference) from tokens sampled by the policy."""

from enum import StrEnum

from jaxtyping import Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Greatest log-ratio, in nats, of which exp() is taken, so that no token overflows float32. It does not bound the loss:
k3 reaches e^20 - 21 = 4.9e8 nats at one token, which then dominates a step's gradient. `kl_cap` bounds k3."""


class KlEstimator(StrEnum):
    """Estimators, named after Schulman 2020, joschu.net/blog/kl-approx.html, with d = log policy - log reference."""

    K1 = "k1"
    """d: unbiased, high variance, may be negative. For the reward only: as a loss its expected on-policy gradient is
    0."""
    K2 = "k2"
    """d^2 / 2: biased, low variance; as a loss its on-policy gradient is that of the KL."""
    K3 = "k3"
    """exp(-d) + d - 1: unbiased, low variance, never negative. Schulman's has no cap, nor has TRL's; verl's
    and ms-swift's are at most 10 nats a token (`kl_cap: 10`)."""
    K3_PLUS = "k3_plus"
    """The value of k3 with the gradient of k2 (straight-through). On-policy that is the gradient of the KL, unlike the
    gradient of k3 (verl `core_algos.py` k3+)."""
    K3_WEIGHTED = "k3_weighted"
    """k3 times policy / old policy, with the ratio's gradient: value and gradient are unbiased for tokens of the old
    policy too (DeepSeek-V3.2, arXiv 2512.02556; TRL use_bias_correction_kl)."""


FOR_LOSSES = frozenset({KlEstimator.K3_PLUS, KlEstimator.K3_WEIGHTED})
"""Estimators that differ from k3 only by their gradient or off-policy. In a reward they would equal k3."""
OF_K3 = frozenset({KlEstimator.K3}) | FOR_LOSSES
"""Estimators with an exponential, which a cap can bound."""


def kl_per_token(
    logprobs: Float[Tensor, " T"],
    reference_logprobs: Float[Tensor, " T"],
    estimator: KlEstimator,
    *,
    old_logprobs: Float[Tensor, " T"] | None = None,
    cap: float | None = None,
) -> Float[Tensor, " T"]:
    """Returns [T] nats, the estimate at each token. The gradient flows through `logprobs` only.

    Args:
        old_logprobs: logprobs of the policy that sampled the tokens, for k3_weighted.
        cap: upper bound of k3 in nats, beyond which it has no gradient; k3_weighted's ratio and k3_plus's gradient are
            not bounded. verl's kl_penalty_forward uses 10. None means no bound, as in Schulman's estimator.
    """
    assert cap is None or estimator in OF_K3
    d = logprobs - reference_logprobs
    if estimator is KlEstimator.K1:
        return d
    if estimator is KlEstimator.K2:
        return d.square() / 2
    # Both terms are clamped: without its exponential, d alone would push the policy further from the reference.
    clamped = d.clamp(min=-MAX_LOG_RATIO)
    k3 = (-clamped).exp() + clamped - 1
    if cap is not None:
        k3 = k3.clamp(max=cap)
    if estimator is KlEstimator.K3_PLUS:
        k2 = d.square() / 2
        return k2 - k2.detach() + k3.detach()
    if estimator is KlEstimator.K3_WEIGHTED:
        assert old_logprobs is not None
        return k3 * (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return k3


def next_coefficient(coefficient: float, kl: float, *, target: float, gain: float) -> float:
    """Returns the KL coefficient after a step whose KL was `kl`: raised or lowered in proportion to the relative error,
    which is limited to 0.2. Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, where gain is 0.1."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + gain * error)
