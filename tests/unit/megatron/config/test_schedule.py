"""Learning rates of each schedule, worked by hand."""

import pytest

from rlframe.megatron.config.optimizer import OptimizerConfig, Schedule
from rlframe.megatron.config.schedule import learning_rate


def rates(total_steps: int, **settings: object) -> list[float]:
    """The rate of every step of a run, with lr 1.0 unless told otherwise."""
    config = OptimizerConfig(**({"lr": 1.0} | settings))  # type: ignore[arg-type]
    return [learning_rate(config, step, total_steps) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": Schedule.CONSTANT}, [1, 1, 1, 1, 1]),
        # From 1 at step 0 to 0 at step 4.
        ({"schedule": Schedule.LINEAR}, [1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": Schedule.LINEAR, "min_lr": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        # (1 + cos(pi k / 4)) / 2
        ({"schedule": Schedule.COSINE}, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"schedule": Schedule.COSINE, "min_lr": 0.5}, [1, 0.926777, 0.75, 0.573223, 0.5]),
        # 40% of 5 steps decay: the last two.
        ({"schedule": Schedule.WSD, "decay_fraction": 0.4}, [1, 1, 1, 0.5, 0]),
        ({"schedule": Schedule.WSD, "decay_fraction": 1.0}, [1, 0.75, 0.5, 0.25, 0]),
        # A tenth of 5 steps, half a step, rounds to none.
        ({"schedule": Schedule.WSD, "decay_fraction": 0.1}, [1, 1, 1, 1, 1]),
    ],
)
def test_schedules_over_five_steps(settings: dict, expected: list[float]) -> None:
    assert rates(5, **settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 1}, [1, 1, 1, 1, 1, 1]),
        # Warm-up reaches 1 at step 1; from step 2 to 5 it falls by a third each.
        ({"warmup_steps": 2, "schedule": Schedule.LINEAR}, [0.5, 1, 1, 2 / 3, 1 / 3, 0]),
        ({"warmup_steps": 2, "schedule": Schedule.COSINE}, [0.5, 1, 1, 0.75, 0.25, 0]),
        # wsd would decay over all six steps, but warm-up comes first.
        ({"warmup_steps": 2, "schedule": Schedule.WSD, "decay_fraction": 1.0}, [0.5, 1, 1, 2 / 3, 1 / 3, 0]),
        # A run shorter than its warm-up.
        ({"warmup_steps": 12, "schedule": Schedule.COSINE}, [1 / 12, 1 / 6, 1 / 4, 1 / 3, 5 / 12, 1 / 2]),
    ],
)
def test_warm_up_rises_linearly_to_the_peak(settings: dict, expected: list[float]) -> None:
    assert rates(6, **settings) == pytest.approx(expected)


def test_decay_steps_end_the_decay_and_min_lr_stays() -> None:
    # Decays over the first three steps of five.
    assert rates(5, schedule=Schedule.LINEAR, decay_steps=3, min_lr=0.1) == pytest.approx([1, 0.55, 0.1, 0.1, 0.1])
    # Or over three of a run's five: longer than the run, it does not get to the end.
    assert rates(3, schedule=Schedule.LINEAR, decay_steps=5) == pytest.approx([1, 0.75, 0.5])


def test_steps_after_the_end_keep_min_lr() -> None:
    config = OptimizerConfig(lr=1.0, schedule=Schedule.COSINE, min_lr=0.25)
    assert learning_rate(config, 99, 5) == 0.25


def test_a_run_of_one_step_takes_it_at_the_peak() -> None:
    assert all(rates(1, schedule=schedule) == [1.0] for schedule in Schedule)


@pytest.mark.parametrize("schedule", Schedule)
def test_the_rate_never_leaves_its_bounds(schedule: Schedule) -> None:
    for warmup_steps in (0, 1, 7):
        for decay_steps in (None, 1, 5, 40):
            values = rates(
                20, lr=3e-4, min_lr=1e-5, schedule=schedule, warmup_steps=warmup_steps, decay_steps=decay_steps
            )
            assert all(1e-5 <= value <= 3e-4 for value in values[warmup_steps:])
            assert all(0 < value <= 3e-4 for value in values[:warmup_steps])


@pytest.mark.parametrize("steps", [0, -3])
def test_a_decay_that_ends_before_the_first_step_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=f"decay_steps must be at least 1 .null: the whole run., got {steps}"):
        OptimizerConfig(decay_steps=steps)


def test_a_warm_up_that_outlasts_the_run_is_told() -> None:
    config = OptimizerConfig(lr=2e-5, warmup_steps=100)
    assert config.caution(100) is None
    assert "warmup_steps=100 is more than the 99 optimizer steps" in (config.caution(99) or "")
