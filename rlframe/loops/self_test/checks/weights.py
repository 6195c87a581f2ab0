"""Check: the weights stay as they are."""

from collections.abc import Iterator

from rlframe.loops.self_test.finding import Check, Finding, found
from rlframe.loops.self_test.seen import Seen


class Weights(Check):
    """At learning rate 0 no bit of the policy's weights changes."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        digests = [seen.weights, *(each.weights for each in seen.steps)]
        changed = [step.step for step, before in zip(seen.steps, digests, strict=False) if step.weights != before]
        yield found(
            "weights stay",
            f"changed in steps {', '.join(map(str, changed))}" if changed else f"the same in {len(seen.steps)} steps",
            fail=bool(changed),
            threshold="no bit changes",
            look="the optimizer moves weights at learning rate 0 and weight decay 0: who else writes to them?",
            numbers={"changes": len(changed)},
        )
        rates = [step.metrics["train/lr"] for step in seen.steps if "train/lr" in step.metrics]
        yield found(
            "learning rate",
            f"{max(map(abs, rates), default=0.0):g}",
            fail=any(rate != 0 for rate in rates),
            threshold="0 in every step",
            look="the schedule of train.optimizer: the optimizer was given another rate than 0",
        )


CHECK = Weights
