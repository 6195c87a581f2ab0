"""How many devices a run needs."""

import pytest

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.placement import count_devices


@pytest.mark.parametrize(
    ("num_ranks", "num_engines", "colocated", "split"),
    [(1, 1, 1, 2), (4, 2, 4, 6), (2, 4, 4, 6), (4, 0, 4, 4)],
)
def test_devices_are_shared_or_added_up(num_ranks: int, num_engines: int, colocated: int, split: int) -> None:
    shape = {"num_ranks": num_ranks, "num_engines": num_engines}
    assert count_devices(**shape, colocate=True) == colocated
    assert count_devices(**shape, colocate=False) == split


@pytest.mark.parametrize("name", ["phase_timeout_s", "start_timeout_s"])
def test_time_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0 seconds, got 0"):
        ClusterConfig(**{name: 0})
