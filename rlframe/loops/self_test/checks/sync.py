"""Check: weights arrive in the engines, and the proof sees if they do not."""

from collections.abc import Iterator

from rlframe.loops.self_test.finding import Check, Finding, bounded, found, skipped
from rlframe.loops.self_test.seen import Seen


class Sync(Check):
    """With the sign of every weight changed, engines and trainer change alike; a changed bit is noticed."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        sync, limit = seen.sync, seen.limit_nats
        if sync is None:
            yield skipped("weight sync", "no engines")
            return
        yield found(
            "syncs are proved",
            sync.refusal or "digests of engines and trainer are equal",
            fail=bool(sync.refusal),
            threshold="equal digests after every sync",
            look="an engine does not hold what the trainer sent; the message names tensor and rank",
        )
        if sync.refusal:
            return
        yield found(
            "changed weights arrive",
            f"the engines' logprobs moved by {sync.moved_nats:.3g} nats",
            fail=not sync.moved_nats > limit,
            threshold=f"above {limit:.2g}",
            look="every weight of the trainer changed, the engine's answers did not: it computes with another copy",
            numbers={"nats": sync.moved_nats},
        )
        yield bounded(
            "gap after the change",
            sync.gap_nats,
            seen.limit_of_changed,
            look="some weights of an engine did not follow the trainer's, although their digests did: a layer that is "
            "left out of the sync, a second copy, or a cache",
            note=" on average",
        )
        yield found(
            "weights return",
            f"{sync.returned_nats:.3g} nats from before at most",
            fail=not sync.returned_nats <= seen.limit_of_one_nats,
            warn=sync.returned_nats > limit,
            threshold=f"at most {limit:.2g}",
            look="after the change was undone the engine does not answer as before",
            numbers={"nats": sync.returned_nats},
        )
        yield found(
            "a changed bit is noticed",
            f"in {sync.disturbed}" if sync.noticed else f"nobody noticed a changed bit of {sync.disturbed}",
            fail=not sync.noticed,
            threshold="the audit names it",
            look="the proof of the weights compares something else than the engine's memory",
        )


CHECK = Sync
