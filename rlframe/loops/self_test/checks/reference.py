"""Check: the reference is the policy, at the start."""

from collections.abc import Iterator

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen


class Reference(Check):
    """The reference has the policy's first weights, so that their KL is 0 as long as nothing is learned."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        if seen.reference is None or seen.logprobs is None or seen.batch is None:
            yield skipped("KL to the reference", "the algorithm has no reference")
            return
        if seen.facts.given_adapter:
            yield skipped("KL to the reference", "the reference is the model without the adapter of train.lora.path")
            return
        mask = seen.batch.loss_mask
        difference = (seen.reference - seen.logprobs).double()[mask]
        # Of the two policies, as in Schulman's k3: never below 0.
        kl = float((difference.exp() - 1 - difference).mean()) if len(difference) else 0.0
        size = float(difference.abs().max()) if len(difference) else 0.0
        # The reference chooses its experts itself where the policy's are the engine's.
        exact = seen.facts.deterministic and seen.batch.routes is None
        yield found(
            "KL to the reference",
            f"{kl:.3g} nats, {size:.3g} at most between logprobs",
            fail=not size <= (0 if exact else seen.limit_of_one_nats),
            warn=size > 0,
            threshold="0" if exact else f"0; fails above {seen.limit_of_one_nats:.2g}",
            look="the reference is another model than the policy started from, or computes otherwise (replayed routes)",
            numbers={"kl_nats": kl, "max_nats": size},
        )


CHECK = Reference
