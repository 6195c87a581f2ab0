"""Check: fixed sequences have the same logprobs after every step."""

from collections.abc import Iterator, Sequence

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Nats, Seen, differences


class Drift(Check):
    """Neither the trainer's nor the engines' logprobs of fixed sequences change from step to step."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        limit = seen.limit_of_one_nats
        if not seen.steps[0].trainer:
            yield skipped("drift of the trainer", "the model gives no logprobs")
            return
        trainer = spread([step.trainer for step in seen.steps])
        yield found(
            "drift of the trainer",
            f"{trainer:.3g} nats at most",
            fail=not trainer <= (0 if seen.facts.deterministic else limit),
            warn=trainer > 0,
            threshold="0" if seen.facts.deterministic else f"0; fails above {limit:.2g} (train.deterministic=false)",
            look="the trainer's logprobs of the same tokens change from step to step although the learning rate is 0: "
            "weights that move, or a forward pass that is not deterministic (train.deterministic=true tells which)",
            numbers={"nats": trainer},
        )
        if not seen.steps[0].engines:
            yield skipped("drift of the engines", "no engines")
            return
        by_engine = zip(*(step.engines for step in seen.steps), strict=True)
        engines = max(spread(each) for each in by_engine)
        yield found(
            "drift of the engines",
            f"{engines:.3g} nats at most",
            fail=not engines <= limit,
            warn=engines > seen.limit_nats,
            threshold=f"at most {seen.limit_nats:.2g}; fails above {limit:.2g}",
            look="an engine's logprobs of the same tokens change although its weights do not: a cache that keeps old "
            "keys and values, or kernels whose sums depend on the batch",
            numbers={"nats": engines},
        )


def spread(steps: Sequence[Nats]) -> float:
    """Returns the greatest difference of a token's logprob from that of the first step."""
    return max((size for other in steps[1:] for size in differences(steps[0], other)), default=0.0)


CHECK = Drift
