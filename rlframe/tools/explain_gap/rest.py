"""Describes by its tokens a gap that no rung explains."""

import numpy as np

from rlframe.tools.explain_gap.gap import Nats
from rlframe.tools.explain_gap.ladder import ROUNDING_NATS
from rlframe.tools.explain_gap.sides import Sample

ALIKE = 0.9
"""Rank correlation above which the sides agree on which tokens are likely."""
CONCENTRATED = 0.5
"""Share of the gap in one hundredth of the tokens, above which it is a matter of few tokens."""


def describe(sample: Sample, engine: Nats, trainer: Nats) -> list[str]:
    """Returns sentences about the rest of the gap: what kind of cause it has, and where in the responses it lies."""
    size = np.abs(trainer.astype(np.float64) - engine)
    if size.mean() < ROUNDING_NATS:
        return ["nothing remains above the rounding of float32"]
    alike = rank_correlation(engine, trainer)
    if alike > ALIKE:
        kind = "what is done with the logits (a softcap, a scale, a bias, a processor), or rounding"
    else:
        kind = "different computations (weights, positions, masks, routing), not rounding"
    few = np.sort(size)[::-1][: max(1, len(size) // 100)].sum() / size.sum()
    found = [f"rank correlation of the sides {alike:.3f}: points at {kind}"]
    if few > CONCENTRATED:
        found.append(f"{few:.0%} of it lies in 1 % of the tokens")
    where = np.concatenate([np.linspace(0, 1, count, endpoint=False) for count in sample.response_tokens])
    quarters = [size[(where >= part / 4) & (where < (part + 1) / 4)] for part in range(4)]
    means = ", ".join(f"{part.mean():.3g}" if len(part) else "-" for part in quarters)
    found.append(f"mean by quarter of the response: {means} nats")
    return found


def rank_correlation(first: Nats, second: Nats) -> float:
    """Returns Spearman's rank correlation; 1 where a side has one value only."""
    ours, theirs = (np.argsort(np.argsort(values)).astype(np.float64) for values in (first, second))
    if min(len(np.unique(first)), len(np.unique(second))) < 2:
        return 1.0
    return float(np.corrcoef(ours, theirs)[0, 1])
