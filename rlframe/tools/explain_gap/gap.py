"""Statistics of the difference between the trainer's and the engine's logprobs of the same tokens."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Nats = Float[np.ndarray, " N"]
"""[N] nats of every sampled token, response after response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The difference d = trainer - engine over N sampled tokens, in nats."""

    num_tokens: int
    mean_nats: float
    """Mean of |d| over the tokens: the statistic of which shares are taken."""
    error_nats: float
    """Standard error of that mean, as if tokens were independent."""
    k3_nats: float
    """Mean of exp(d) - d - 1: the k3 estimate of KL(engine, trainer) from the engine's samples."""
    p99_nats: float
    """99 % of the tokens have a smaller |d|."""
    max_nats: float


def gap(engine: Nats, trainer: Nats) -> Gap:
    """Returns the statistics of `trainer - engine`."""
    difference = trainer.astype(np.float64) - engine.astype(np.float64)
    size = np.abs(difference)
    return Gap(
        num_tokens=len(size),
        mean_nats=float(size.mean()),
        error_nats=float(size.std() / np.sqrt(len(size))),
        k3_nats=float((np.exp(np.minimum(difference, 20.0)) - difference - 1.0).mean()),
        p99_nats=float(np.quantile(size, 0.99)),
        max_nats=float(size.max()),
    )
