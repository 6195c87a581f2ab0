"""A tenth of the seeds of tests/campaigns/samples/test_nothing_lost.py, for `make check`."""

from pathlib import Path

from tests.campaigns.samples.test_nothing_lost import NUM_SEEDS, PARTS, folder, quiet, try_seeds

__all__ = ["folder", "quiet"]


def test_nothing_is_lost_or_doubled_and_the_lag_is_kept(folder: Path) -> None:
    try_seeds(list(range(0, NUM_SEEDS, PARTS)), folder)
