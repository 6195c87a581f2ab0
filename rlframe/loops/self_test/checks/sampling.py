"""Check: the tokens are drawn from the distribution whose logprobs are reported."""

import math
from collections.abc import Iterator

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen

DEVIATIONS = 6.0
"""Standard errors beyond chance."""
NATS = 0.02
"""Difference that is of no importance, however certain it is."""


class Sampling(Check):
    """Sampled tokens are on average as unlikely as the entropy of their distributions says."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        batch = seen.rollout_batch
        if batch is None or seen.entropies is None or seen.logprobs is None or not batch.loss_mask.any():
            yield skipped("surprise of samples", "no engine samples")
            return
        if seen.facts.filtered:
            yield skipped("surprise of samples", "top_p, top_k or min_tokens change the distribution")
            return
        excess = (-seen.logprobs - seen.entropies).double()[batch.loss_mask]
        mean, count = float(excess.mean()), len(excess)
        error = float(excess.std()) / math.sqrt(count) if count > 1 else math.inf
        certain = abs(mean) > DEVIATIONS * error and abs(mean) > NATS
        yield found(
            "surprise of samples",
            f"{mean:+.3g} nats from the entropy, {count} tokens, +- {error:.2g}",
            fail=certain or not math.isfinite(mean),
            threshold=f"0, up to {DEVIATIONS:g} standard errors or {NATS} nats",
            look="tokens are not drawn from the distribution whose logprobs the trainer computes: the sampler's "
            "temperature, its filters, a penalty for repetition, or logprobs of other tokens",
            numbers={"nats": mean, "error": error},
        )


CHECK = Sampling
