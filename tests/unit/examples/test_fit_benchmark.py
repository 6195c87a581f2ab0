"""The driver that measures preflight's frozen cases one by one: what it takes, and what it calls near enough."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import fit
import preflight
from recipe_cases import FROZEN


def pair(predicted: float | None, measured: float) -> dict[str, float | None]:
    return {"predicted": predicted, "measured": measured}


def test_every_frozen_case_is_run_once() -> None:
    planned = [case for cases in fit.PLANS.values() for case in cases]
    assert sorted(planned) == sorted([*preflight.FROZEN, *FROZEN])
    assert not set(preflight.FROZEN) & set(FROZEN)


def test_a_case_is_near_if_the_peak_of_each_device_and_every_phase_that_takes_time_is() -> None:
    case = {
        "kind": "recipe",
        "memory_bytes": [{"generation": pair(10.0, 20.0), "train": pair(101.0, 100.0)}, {"train": pair(45.0, 50.0)}],
        "seconds": {"train": pair(2.4, 2.0), "weight sync": pair(0.1, 0.4), "evaluation": pair(None, 3.0)},
    }
    # The generation's half does not decide whether the run fits, and a short phase counts within the step.
    assert fit.is_within(case)
    assert fit.timed(case)[0] == ("step", {"predicted": 2.5, "measured": 2.4})
    assert not fit.is_within(case | {"seconds": {"train": pair(2.6, 2.0), "weight sync": pair(0.1, 0.4)}})
    assert not fit.is_within(case | {"memory_bytes": [case["memory_bytes"][0], {"train": pair(44.0, 50.0)}]})
    assert not fit.is_within({"error": "exit status 1"})


def test_a_table_has_a_line_for_what_failed() -> None:
    step = {"kind": "training step", "device": "h100", "memory_bytes": [{"train": pair(9.5e9, 10e9)}]}
    step |= {"seconds": {"train": pair(1.0, 2.0), "logprobs": pair(0.3, 0.3)}}
    lines = fit.table({"slow": step, "broken": {"error": "exit status 1\nCUDA out of memory"}}).splitlines()
    assert lines[2:4] == [
        "| slow | training step | h100 | 9.5 | 10.0 | -5.0 % | train | 1.00 | 2.00 | -50.0 % |",
        "|  |  |  |  |  |  | logprobs | 0.30 | 0.30 | +0.0 % |",
    ]
    assert lines[4].startswith("| broken | exit status 1 |")
    assert lines[-1] == "0 of 2 cases are within the limits."
