"""Check: engine and trainer agree about the tokens that were sampled."""

from collections.abc import Iterator

from rlframe.loops.self_test.finding import Check, Finding, bounded, found, skipped
from rlframe.loops.self_test.seen import Seen, StepSeen, mean_difference

GROWTH_WARN, GROWTH_FAIL = 3.0, 10.0
"""Factors by which the gap may grow with the position in a response."""
LOOK = "engine and trainer compute other logprobs from the same weights: rlframe.tools.explain_gap tells causes apart"


class GapCheck(Check):
    """The engine's logprobs of the tokens that it sampled are the trainer's, at every position and in every step."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        steps = [step for step in seen.steps if step.gap]
        if not steps:
            yield skipped("gap", "no engine samples")
            return
        gaps = [step.gap for step in steps if step.gap]
        largest = max(gap.max_nats for gap in gaps)
        note = f" on average, {largest:.3g} at most"
        if seen.rounding:
            note += f"; the last bit of every weight moves {seen.rounding.sampled_nats:.3g}"
        yield bounded(
            "gap of sampled tokens", max(gap.mean_nats for gap in gaps), seen.limit_of_sampled, look=LOOK, note=note
        )
        yield bounded("gap of fixed tokens", max(map(fixed, steps)), seen.limit_of_fixed, look=LOOK, note=" on average")
        yield by_position(seen)
        yield by_step(seen, [gap.mean_nats for gap in gaps])


def fixed(step: StepSeen) -> float:
    """Returns the mean difference of the fixed sequences, of the worst engine."""
    return max((mean_difference(engine, step.trainer) for engine in step.engines), default=0.0)


def by_position(seen: Seen) -> Finding:
    """Returns whether the gap of the last step grows with the position in the response."""
    bands = next(step.gap for step in reversed(seen.steps) if step.gap).bands
    first, last = bands[0].mean_nats, bands[-1].mean_nats
    floor = seen.limit_nats / 10
    factor = last / max(first, floor)
    shown = ", ".join(f"{band.first}-{band.last}: {band.mean_nats:.2g}" for band in bands)
    return found(
        "gap by position",
        f"{shown} nats",
        fail=factor > GROWTH_FAIL,
        warn=factor > GROWTH_WARN,
        threshold=f"the last quarter of tokens at most {GROWTH_WARN:g} times the first",
        look="the gap grows along the response: positions, the engine's cache, or an attention window",
        numbers={"factor": factor},
    )


def by_step(seen: Seen, means: list[float]) -> Finding:
    """Returns whether the gap grows from step to step."""
    factor = means[-1] / max(means[0], seen.limit_nats / 10)
    return found(
        "gap by step",
        f"{means[0]:.2g} nats in the first step, {means[-1]:.2g} in the last",
        fail=factor > GROWTH_FAIL,
        warn=factor > GROWTH_WARN,
        threshold=f"at most {GROWTH_WARN:g} times the first",
        look="the gap grows although no weight changes: something that is kept between steps, such as a cache",
        numbers={"factor": factor},
    )


CHECK = GapCheck
