"""Check: advantages are finite, of sampled tokens only, and larger for better attempts."""

from collections.abc import Iterator

import torch

from rlframe.loops.self_test.finding import Check, Finding, found, skipped
from rlframe.loops.self_test.seen import Seen
from rlframe.types.batch import TrainBatch


class Advantages(Check):
    """Advantages follow the rewards."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        batch = seen.batch
        if not isinstance(batch, TrainBatch):
            yield skipped("advantages", "the algorithm has none")
            return
        advantages, mask = batch.advantages, batch.loss_mask
        outside, bad = int((advantages[~mask] != 0).sum()), int((~advantages.isfinite()).sum())
        weights = seen.token_weights if seen.token_weights is not None else mask.float()
        total = float((advantages.double() * weights.double()).sum())
        flat = not bool((advantages != 0).any())
        yield found(
            "advantages",
            f"weighted sum {total:.4g}; {bad} not finite, {outside} outside the mask" + (", all 0" if flat else ""),
            fail=bool(outside or bad),
            warn=flat,
            threshold="finite, 0 outside the mask, not all 0",
            look="advantages of tokens that nobody sampled; or groups whose rewards are all equal, which teach nothing",
            numbers={"weighted_sum": total, "outside": outside, "not_finite": bad},
        )
        yield order(batch)


def order(batch: TrainBatch) -> Finding:
    """Returns whether the attempts of a group with higher rewards have higher advantages."""
    index, kept = batch.sequence_index(), batch.loss_mask
    count = torch.zeros(batch.num_sequences).index_add_(0, index[kept], torch.ones(int(kept.sum())))
    sums = torch.zeros(batch.num_sequences).index_add_(0, index[kept], batch.advantages[kept].float())
    means = sums / count.clamp(min=1)
    shared = batch.group[:, None] == batch.group[None, :]
    gains = batch.rewards[:, None] - batch.rewards[None, :]
    usable = shared & (gains > 0) & (count[:, None] > 0) & (count[None, :] > 0)
    wrong = int((usable & (means[:, None] < means[None, :])).sum())
    pairs = int(usable.sum())
    if not pairs:
        return skipped("order of advantages", "no group has different rewards")
    return found(
        "order of advantages",
        f"{wrong} of {pairs} pairs of a group are the wrong way round",
        fail=wrong > pairs / 2,
        warn=wrong > pairs / 10,
        threshold="at most a tenth",
        look="attempts with a higher reward than another of their group have a lower advantage: the sign, the groups, "
        "or rewards at single tokens that outweigh them",
        numbers={"wrong": wrong, "pairs": pairs},
    )


CHECK = Advantages
