"""The table of a sweep."""

from rlframe.config.sweep import Job, table


def job(overrides: str, results: dict[str, float], *, code: int = 0, output: str = "") -> Job:
    """A job that took two seconds."""
    made = Job(overrides=overrides.split(), started=0.0, output=output)
    made.end(results, code=code)
    made.seconds = 2.0
    return made


def test_a_sweep_ends_in_a_table_of_what_each_job_came_to() -> None:
    online = {"before/match_mean": 0.25, "after/match_mean": 0.75, "held_out_prompts": 8.0}
    offline = {"first_loss": 3.0, "last_loss": 0.5, "before/loss": 3.0, "after/loss": 1.0, "after/accuracy": 0.875}
    jobs = [
        job("algorithm=grpo", online, output="outputs/a/0"),
        job("algorithm=sft", {"first_loss": 3.0, "last_loss": 0.123456}, output="outputs/a/1"),
        job("algorithm=dpo", offline, output="outputs/a/3"),
        job("algorithm=rloo", {}, output="outputs/a/2", code=1),
        job("algorithm.group_size=1", {}, code=2),
    ]
    assert table(jobs).splitlines() == [
        "overrides               match  loss    accuracy  seconds  output",
        "algorithm=grpo          0.75   -       -         2.0      outputs/a/0",
        "algorithm=sft           -      0.1235  -         2.0      outputs/a/1",
        "algorithm=dpo           -      1       0.875     2.0      outputs/a/3",
        "algorithm=rloo          -      -       -         2.0      outputs/a/2 (failed)",
        "algorithm.group_size=1  -      -       -         2.0      refused",
    ]


def test_what_all_jobs_have_is_said_once() -> None:
    jobs = [
        job(f"algorithm={name} steps=2 train.optimizer.lr={lr} seed=1", {"last_loss": 0.5}, output=f"o/{index}")
        for index, (name, lr) in enumerate((name, lr) for name in ("grpo", "rloo") for lr in ("1e-6", "3e-6"))
    ]
    assert table(jobs).splitlines() == [
        "overrides                               loss  seconds  output",
        "algorithm=grpo train.optimizer.lr=1e-6  0.5   2.0      o/0",
        "algorithm=grpo train.optimizer.lr=3e-6  0.5   2.0      o/1",
        "algorithm=rloo train.optimizer.lr=1e-6  0.5   2.0      o/2",
        "algorithm=rloo train.optimizer.lr=3e-6  0.5   2.0      o/3",
        "all with steps=2 seed=1",
    ]
    # Of one job everything is its own.
    assert table(jobs[:1]).splitlines()[1].startswith("algorithm=grpo steps=2 ")
