"""What a policy lag costs in accuracy: the main job with engines of their own at several lags, after equal samples.

    python examples/benchmarks/lag.py [--lags 0 1 4] [--seeds 3] [--steps 120] [--set KEY=VALUE ...] [--smoke]

Every lag has the same settings but `loop.max_policy_lag` and `loop.pipeline_depth` (at most 2), and so the same number
of samples in every step. The loss is GRPO's with `correction.bypass`: PPO's clip against the engine's logprobs, which
is a trust region for tokens of older policies; `--set` tries another. One run after the other, each with all cores.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from algorithms import RESULTS, RL, Case, Job, Result, Section, Settings, measure
from curves_svg import spread

from rlframe.tools.doctor import versions

DEPTH = 2
"""Greatest number of steps that are sampled ahead."""
SMOKE: Settings = {
    "steps": 3,
    "prompts_per_step": 8,
    "evaluation.every_steps": 1,
    "data.evaluation_count": 8,
    "train.optimizer.warmup_steps": 1,
}


def section(lags: Sequence[int], *, steps: int) -> Section:
    """A case for each lag."""
    return Section(
        title="Held-out arithmetic, greedy, by policy lag",
        settings={
            "steps": steps,
            "cluster.colocate": "false",
            "algorithm.correction.bypass": "true",
            "evaluation.every_steps": max(1, steps // 6),
            "cluster.start_timeout_s": 900,
        },
        cases={str(lag): Case(RL, loop_settings(lag)) for lag in lags},
        metric="evaluation/exact_match_mean",
        smoke=SMOKE,
        times=(
            "time/step_s",
            "rollout/lag_mean",
            "rollout/lag_max",
            "rollout/logprob_gap_mean_nats",
            "train/clip_fraction",
        ),
    )


def loop_settings(lag: int) -> Settings:
    """The settings of a lag."""
    return {"loop.max_policy_lag": lag, "loop.pipeline_depth": min(lag, DEPTH)} if lag else {}


def table(measured: dict[str, list[Result]]) -> str:
    """Markdown: a row for each lag, the mean of its seeds with the least and the greatest."""
    rows = ["| lag | at half of the samples | at the end | mean lag of a token | step, s |", "|---|---|---|---|---|"]
    for lag, runs in measured.items():
        half, end = ([run.curve[index][1] for run in runs] for index in (len(runs[0].curve) // 2, -1))
        times = {key: fmean(run.times.get(key, 0.0) for run in runs) for key in ("rollout/lag_mean", "time/step_s")}
        rows.append(f"| {lag} | {spread(half)} | {spread(end)} | {times['rollout/lag_mean']:.2f} | "
                    f"{times['time/step_s']:.2f} |")  # fmt: skip
    return "\n".join(rows)


def record(made: Section, measured: dict[str, list[Result]], more: list[str]) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "settings": made.settings,
        "set": more,
        "x": "rollouts",
        "metric": made.metric,
        "lags": {
            lag: {
                "settings": made.cases[lag].settings,
                "runs": [
                    {"curve": run.curve, "seconds": round(run.seconds, 1), "median_of_steps": run.times} for run in runs
                ],
            }
            for lag, runs in measured.items()
        },
    }


def main() -> None:
    """Run every lag with every seed, and write the table and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run")
    parser.add_argument("--name", default="lag", help="of the JSON file in the results")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    made = section(arguments.lags, steps=arguments.steps)
    folder = Path(tempfile.mkdtemp()) if arguments.smoke else RESULTS
    done: list[tuple[str, Result]] = []
    for seed in range(arguments.seeds):
        jobs = [
            Job(section=made, case=lag, seed=seed, smoke=arguments.smoke, more=tuple(arguments.set))
            for lag in made.cases
        ]
        found = measure(jobs, side_by_side=1)
        done += [(job.case, result) for job, result in zip(jobs, found, strict=True) if result]
        # After each seed, so that what is measured is not lost.
        measured = {lag: runs for lag in made.cases if (runs := [result for case, result in done if case == lag])}
        kept = replace(made, settings=made.settings | (SMOKE if arguments.smoke else {}))
        text = json.dumps(record(kept, measured, arguments.set))
        (folder / f"{arguments.name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{table(measured)}\n{folder}/{arguments.name}.json")


if __name__ == "__main__":
    main()
