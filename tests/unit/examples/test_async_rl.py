"""The arithmetic behind the benchmark of asynchronous training."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import async_rl


def test_an_engine_is_idle_where_it_has_no_request() -> None:
    # 2 requests from second 1 to 4, none until 6, then 1 for good; looked at from 2 to 10.
    changes = [(1.0, 2), (4.0, 0), (6.0, 1)]
    idle, requests = async_rl.occupancy(changes, 2.0, 10.0)
    assert idle == pytest.approx(2 / 8)
    assert requests == pytest.approx((2 * 2 + 1 * 4) / 8)


def test_rooflines_are_a_sum_in_turns_and_the_longer_part_with_a_lag() -> None:
    cases = {
        "lag0": {"phases_s": {"rollout": 6.0, "train": 4.0}, "step_s": 12.5, "samples_per_s": 2.0},
        "lag1": {"phases_s": {"rollout": 3.0, "train": 4.0}, "step_s": 7.5, "samples_per_s": 3.0},
    }
    found = async_rl.ratios(cases)
    assert found["lag0/of_roofline"] == pytest.approx(10 / 12.5)
    assert found["lag1/of_roofline"] == pytest.approx(6 / 7.5)
    assert found["lag1/over_lag0"] == pytest.approx(1.5)
