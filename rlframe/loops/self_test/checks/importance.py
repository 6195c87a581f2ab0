"""Check: on policy the importance ratios are 1."""

from collections.abc import Iterator

from rlframe.loops.self_test.finding import Check, Finding, bounded, found, skipped
from rlframe.loops.self_test.seen import Limit, Seen


class Importance(Check):
    """The policy that trains is the one that sampled, so that every ratio between them is 1."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        gaps = [step.gap for step in seen.steps if step.gap]
        if not gaps:
            yield skipped("ratio to the sampler", "no engine samples")
            return
        away = max((abs(gap.mean_ratio - 1) for gap in gaps), key=lambda each: (each != each, each))
        yield bounded(
            "ratio to the sampler",
            away,
            Limit.of(seen.limit_nats),
            unit="from 1",
            note=" on average",
            look="trainer's probabilities divided by the engine's: see the gap",
        )
        batch = seen.rollout_batch
        if batch is None or batch.old_logprobs is None or seen.logprobs is None:
            yield skipped("ratio to the old policy", "the update uses the logprobs of its own pass")
            return
        size = float((seen.logprobs - batch.old_logprobs)[batch.loss_mask].abs().max())
        yield found(
            "ratio to the old policy",
            f"{size:.3g} nats from 1 at most",
            fail=not size <= (0 if seen.facts.deterministic else seen.limit_of_one_nats),
            warn=size > 0,
            threshold="0",
            look="logprobs of before the update are not those of the same weights after it",
            numbers={"nats": size},
        )


CHECK = Importance
