"""The benchmark of recipes: which samples of memory belong to which phase."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import recipes
from device_memory import peaks


def test_memory_of_a_phase_is_that_after_the_roles_have_changed() -> None:
    phases = [
        {"name": "rollout", "start_s": 0.0, "ready_s": 2.0, "end_s": 5.0},
        {"name": "old_logprobs", "start_s": 5.0, "ready_s": 6.0, "end_s": 8.0},
        {"name": "account", "start_s": 8.0, "end_s": 9.0},
    ]
    # Sampled every half second: until its end the policy leaves, or the engines do.
    levels = [(0.0, 70.0), (2.0, 30.0), (5.0, 100.0), (5.9, 140.0), (8.0, 60.0)]
    samples = [(at / 2, next(level for until, level in levels if at / 2 <= until)) for at in range(17)]
    timeline = [{"step": 3, "phases": phases}]
    assert peaks(samples, recipes.spans(timeline, of="roles")) == {"generation": 100.0, "logprobs": 60.0}
    assert peaks(samples, recipes.spans(timeline, of="changes")) == {"generation": 30.0, "logprobs": 140.0}
    assert recipes.medians(timeline) == {"generation": 5.0, "logprobs": 3.0}


def test_a_sample_that_arrives_with_a_phase_is_of_the_moment_before() -> None:
    spans = [("train", 1.0, 2.0)]
    assert peaks([(1.01, 9.0), (1.06, 5.0), (2.0, 6.0), (2.01, 7.0)], spans) == {"train": 6.0}


def test_what_processes_say_of_themselves_is_the_median_of_the_steps_that_say_it() -> None:
    steps = [{"time/train_s": value, "loss": 1.0} for value in (1.0, 5.0, 2.0)] + [{"memory/policy_stuck_bytes": 7.0}]
    assert recipes.own(steps) == {"memory/policy_stuck_bytes": 7.0, "time/train_s": 2.0}
