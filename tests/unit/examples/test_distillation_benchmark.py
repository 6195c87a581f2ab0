"""The benchmark of distillation: the runs of every method are accepted."""

import sys
from pathlib import Path

import pytest

from rlframe.run.check import planned_faults
from rlframe.run.load import load

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import distillation


@pytest.mark.thorough
@pytest.mark.parametrize("method", distillation.METHODS)
def test_the_run_of_a_student_is_accepted(method: str) -> None:
    config, _ = distillation.METHODS[method]
    given = distillation.settings(method, distillation.STUDENT, seed=1, steps=20, every=10)
    assert [str(fault) for fault in planned_faults(load(config, given))] == []
