"""A tenth of the seeds of tests/campaigns/samples/test_nothing_lost.py, for `make check`."""

from pathlib import Path

from tests.campaigns.samples.test_nothing_lost import NUM_SEEDS, PARTS, folder, quiet, try_seeds
from tests.unit.attempts.simulated.settings import drawn_with_oversampling

__all__ = ["folder", "quiet"]


def test_nothing_is_lost_or_doubled_and_the_lag_is_kept(folder: Path) -> None:
    try_seeds(list(range(0, NUM_SEEDS, PARTS)), folder)


def test_so_it_is_with_groups_that_a_step_does_not_wait_for(folder: Path) -> None:
    try_seeds(list(range(0, NUM_SEEDS, PARTS)), folder, drawn_with_oversampling)
