"""The benchmark of long sequences predicts each of its cases, so that a run on a GPU does not end at the prediction."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import long_context


@pytest.mark.parametrize("name", long_context.CASES)
def test_each_case_has_a_prediction(name: str) -> None:
    case = long_context.CASES[name]
    found = long_context.predict(case, case.lengths[0])
    assert found["memory_bytes"] > 0 and found["train_s"] > 0
