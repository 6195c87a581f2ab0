"""The benchmark of weight sync: every case's engine is accepted."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import weight_sync


@pytest.mark.parametrize("name", weight_sync.CASES)
def test_the_settings_of_a_cases_engine_are_accepted(name: str) -> None:
    assert weight_sync.engine_settings(weight_sync.CASES[name]).tp == weight_sync.CASES[name].tp
