"""Check: the same batch gives the same numbers twice."""

import math
from collections.abc import Iterator, Mapping

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen

LIMIT = 0.05
"""Relative difference of a metric at which the check fails where nothing asks for the same bits."""


class Determinism(Check):
    """The last batch, done twice with the same weights, gives the same logprobs, loss and gradients."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        repeats, exact = seen.repeats, seen.facts.deterministic
        if repeats is None:
            yield skipped("same batch twice", "it was not done twice")
            return
        yield found(
            "logprobs twice",
            f"{repeats.logprobs:.3g} nats apart",
            fail=not repeats.logprobs <= (0 if exact else seen.limit_of_one_nats),
            warn=repeats.logprobs > 0,
            threshold="0" if exact else f"0; fails above {seen.limit_of_one_nats:.2g} (train.deterministic=false)",
            look="the trainer's forward pass gives other logprobs for the same tokens",
            numbers={"nats": repeats.logprobs},
        )
        yield twice("loss twice", repeats.losses, exact=exact)
        if seen.facts.dropout:
            yield skipped("gradients twice", "train.lora.dropout drops other activations each time")
        else:
            yield twice("gradients twice", repeats.trained, exact=exact)
        norm = repeats.trained.get("train/grad_norm", (math.nan, math.nan))[0]
        yield found(
            "gradients finite",
            f"norm {norm:.4g}",
            fail=not math.isfinite(norm),
            warn=norm == 0,
            threshold="finite and above 0",
            look="infinite or no gradients: rewards, masks and logprobs of samples.jsonl; groups whose rewards are all "
            "equal have no gradient",
            numbers={"norm": norm},
        )


def twice(what: str, metrics: Mapping[str, tuple[float, float]], *, exact: bool) -> Finding:
    """Returns a finding about metrics of two times."""
    sizes = {name: relative(*pair) for name, pair in metrics.items()}
    worst = max(sizes, key=lambda name: sizes[name], default="")
    size = sizes.get(worst, 0.0)
    return found(
        what,
        f"{worst} differs by {size:.2g} of itself" if size else f"{len(sizes)} metrics alike, bit for bit",
        fail=size > (0 if exact else LIMIT),
        warn=size > 0,
        threshold="no bit differs" if exact else f"no bit differs; fails above {LIMIT} (train.deterministic=false)",
        look="the same batch and the same weights give other numbers: kernels that add in another order "
        "(train.deterministic=true), or a random number without a seed",
        numbers={"relative": size},
    )


def relative(one: float, other: float) -> float:
    """Returns the difference of two numbers relative to the larger one. Two NaN are alike."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-6)


CHECK = Determinism
