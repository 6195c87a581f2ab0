"""Check: seeds decide the samples."""

from collections.abc import Iterator, Sequence

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen

LEAST = 0.75
"""Least fraction of a response that must come again with the same seed, if it is not more than half-way from what other
seeds give to 1. Rounding may change a few responses."""
CERTAIN_NATS = 0.05
"""Mean surprise of a token below which other seeds may give the same responses."""


class Seeds(Check):
    """The same seeds give the same tokens, other seeds other ones."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        tried = seen.resampled
        if tried is None:
            yield skipped("seeds", "no engine samples")
            return
        alike, other = shared_fraction(tried.first, tried.again), shared_fraction(tried.first, tried.others)
        # Of a policy that is nearly certain most tokens come again whatever the seed.
        least = max(LEAST, (1 + other) / 2)
        yield found(
            "same seeds",
            f"{alike:.1%} of {len(tried.first)} responses come again",
            fail=alike < least and seen.facts.single_turn,
            warn=alike < 1,
            threshold=f"100 %; fails below {least:.0%}" + ("" if seen.facts.single_turn else ", if nothing answers"),
            look="the engine does not sample by the seed of a request: a run cannot be repeated. A few responses may "
            "differ where rounding depends on the batch",
            numbers={"fraction": alike},
        )
        certain = _is_certain(seen)
        yield found(
            "other seeds",
            f"{other:.1%} alike",
            fail=other == 1 and not certain,
            warn=other == 1,
            threshold="below 100 %",
            look="every prompt gets the same response, whatever the seed: groups without differences teach nothing",
            numbers={"fraction": other},
        )
        distinct = len({tuple(each) for each in tried.first})
        yield found(
            "different attempts",
            f"{distinct} of {len(tried.first)} responses differ",
            fail=False,
            warn=distinct == 1 and len(tried.first) > 1 and not certain,
            threshold="more than 1",
            look="all attempts have the same tokens",
        )


def shared_fraction(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Returns the mean fraction of a response's tokens, from its beginning, that the other one has too."""
    shares = []
    for one, other in zip(some, others, strict=True):
        longest = max(len(one), len(other))
        equal = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        shares.append(1.0 if not longest else (min(len(one), len(other)) if equal is None else equal) / longest)
    return sum(shares) / max(1, len(shares))


def _is_certain(seen: Seen) -> bool:
    """Returns whether the policy nearly always takes the most likely token."""
    batch = seen.rollout_batch
    if batch is None or not batch.loss_mask.any():
        return False
    return float(-batch.rollout_logprobs[batch.loss_mask].mean()) < CERTAIN_NATS


CHECK = Seeds
