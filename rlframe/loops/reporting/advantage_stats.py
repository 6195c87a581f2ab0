"""Counts of steps from which nothing is learned. The first of each kind is logged."""

import logging

from rlframe.types.batch import TrainBatch

logger = logging.getLogger(__name__)
FLAT, EMPTY = "train/steps_without_advantage", "train/steps_without_tokens"
CAUSES = {
    FLAT: "every advantage of the %d rollouts is 0: rewards differ in no group, so only KL and entropy "
    "train; use easier or harder prompts, larger groups or algorithm.dynamic_sampling",
    EMPTY: "no token of the %d rollouts is in the loss; check what truncates them, such as rollout.max_tokens",
}


UNSCORED = (
    "no attempt of the %d rollouts has a reward: every part returned None, so only KL and entropy train; a function "
    "that ends without `return` gives None"
)
"""Cause of a step without advantages that has no rewards either."""


class AdvantageStats:
    """Counts of steps without a signal so far, by reason."""

    def __init__(self, results: dict[str, float], *, by_advantages: bool = True):
        """
        Args:
            results: of the run, and part of its checkpoints; the counts are kept there.
            by_advantages: False where the loss learns from something else, such as a divergence.
        """
        self._results = results
        self._causes = CAUSES if by_advantages else {EMPTY: CAUSES[EMPTY]}

    def of(self, step: int, batch: TrainBatch) -> dict[str, float]:
        """Returns the counts with this step's batch, as metrics. Logs a warning if it is the run's first of its
        kind."""
        empty = not bool(batch.loss_mask.any())
        self._count(EMPTY, empty, step, batch, cause=CAUSES[EMPTY])
        if FLAT in self._causes:
            flat = not empty and not bool(batch.advantages.any())
            cause = UNSCORED if bool(batch.rewards.isnan().all()) else CAUSES[FLAT]
            self._count(FLAT, flat, step, batch, cause=cause)
        return {key: self._results[key] for key in self._causes}

    def _count(self, key: str, found: bool, step: int, batch: TrainBatch, *, cause: str) -> None:
        self._results.setdefault(key, 0.0)
        self._results[key] += found
        if found and self._results[key] == 1:
            text = f"step %d: {cause}. Further such steps are only counted, in %s"
            logger.warning(text, step, batch.num_sequences, key)
