"""Check: engine and trainer divide the logits by the temperature of the settings."""

from collections.abc import Iterator

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen

CLEARLY = 3.0
"""Factor by which another temperature must fit better to be taken for the engine's."""


class Temperature(Check):
    """The trainer's default is rollout.temperature, and no other temperature explains the engine's logprobs better."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        stated, gaps = seen.facts.temperature, seen.gaps_by_temperature
        if seen.logprobs is None or seen.at_temperature is None or not gaps:
            yield skipped("temperature", "no engine samples")
            return
        size = float((seen.logprobs[: len(seen.at_temperature)] - seen.at_temperature).abs().max())
        yield found(
            "trainer's temperature",
            f"{size:.3g} nats from its logprobs at {stated:g}",
            fail=not size <= seen.limit_of_one_nats,
            threshold=f"at most {seen.limit_of_one_nats:.2g}",
            look="the trainer's logprobs are not those at rollout.temperature",
            numbers={"nats": size},
        )
        best = min(gaps, key=lambda each: gaps[each])
        clear = gaps[stated] > CLEARLY * gaps[best] and gaps[stated] - gaps[best] > seen.limit_nats / 3
        yield found(
            "engine's temperature",
            f"{best if clear else stated:g} fits best of {len(gaps)} from {min(gaps):g} to {max(gaps):g}",
            fail=clear,
            threshold=f"rollout.temperature={stated:g}",
            look="the engine's logprobs are those of another temperature: its own settings, such as a "
            "generation_config.json, or logprobs before the temperature",
            numbers={"best": best, "gap_nats": gaps[stated], "best_gap_nats": gaps[best]},
        )


CHECK = Temperature
