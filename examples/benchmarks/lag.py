"""What a policy lag costs in accuracy: the main job with engines of their own at several lags, after equal samples.

    python examples/benchmarks/lag.py [--lags 0 1 4] [--seeds 0 1 2] [--steps 120] [--set KEY=VALUE ...] [--smoke]

Every lag has the same settings but `loop.max_policy_lag` and `loop.pipeline_depth` (at most 2, or what stands behind a
colon, as in 4:4), and so the same number of samples in every step. The loss is GRPO's with `correction.bypass`: PPO's
clip against the engine's logprobs, which is a trust region for tokens of older policies; `--set` tries another. One run
after the other, each with all cores. Runs of other seeds with the same settings stay in the JSON file.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
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


def section(lags: Sequence[str], *, steps: int) -> Section:
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
        cases={lag: Case(RL, loop_settings(lag)) for lag in lags},
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


def loop_settings(text: str) -> Settings:
    """The settings of a lag, with a depth behind a colon or without."""
    lag, _, depth = text.partition(":")
    if lag == "0":
        return {}
    return {"loop.max_policy_lag": int(lag), "loop.pipeline_depth": int(depth or min(int(lag), DEPTH))}


Runs = dict[str, list[dict[str, Any]]]
"""By lag, what each seed gave."""


def table(measured: Runs) -> str:
    """Markdown: a row for each lag, the mean of its seeds with the least and the greatest."""
    rows = ["| lag | at half of the samples | at the end | mean lag of a token | step, s |", "|---|---|---|---|---|"]
    for lag, runs in measured.items():
        half, end = ([run["curve"][index][1] for run in runs] for index in (len(runs[0]["curve"]) // 2, -1))
        medians = [run["median_of_steps"] for run in runs]
        times = {key: fmean(each.get(key, 0.0) for each in medians) for key in ("rollout/lag_mean", "time/step_s")}
        rows.append(f"| {lag} | {spread(half)} | {spread(end)} | {times['rollout/lag_mean']:.2f} | "
                    f"{times['time/step_s']:.2f} |")  # fmt: skip
    return "\n".join(rows)


def known(file: Path, settings: Settings, more: list[str]) -> Runs:
    """The runs of the file, if they have these settings."""
    if not file.exists():
        return {}
    record = json.loads(file.read_text(encoding="utf-8"))
    same = record["settings"] == settings and record["set"] == more
    return record["lags"] if same else {}


def told(seed: int, result: Result) -> dict[str, Any]:
    """One run, as the file holds it."""
    seconds = round(result.seconds, 1)
    return {"seed": seed, "curve": result.curve, "seconds": seconds, "median_of_steps": result.times}


def main() -> None:
    """Run every lag with every seed, and write the table and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", nargs="+", default=["0", "1", "4"], metavar="LAG[:DEPTH]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    made = section(arguments.lags, steps=arguments.steps)
    file = (Path(tempfile.mkdtemp()) if arguments.smoke else RESULTS) / "lag.json"
    runs = known(file, made.settings, arguments.set)
    for seed in arguments.seeds:
        jobs = [
            Job(section=made, case=lag, seed=seed, smoke=arguments.smoke, more=tuple(arguments.set))
            for lag in made.cases
        ]
        for job, result in zip(jobs, measure(jobs, side_by_side=1), strict=True):
            others = [run for run in runs.get(job.case, []) if run["seed"] != seed]
            runs[job.case] = sorted([*others, *([told(seed, result)] if result else [])], key=lambda run: run["seed"])
        # After each seed, so that what is measured is not lost.
        record = {
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "versions": versions(),
            "cores": len(os.sched_getaffinity(0)),
            "settings": made.settings,
            "set": arguments.set,
            "by_lag": {lag: loop_settings(lag) for lag in runs},
            "x": "rollouts",
            "metric": made.metric,
            "lags": runs,
        }
        file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"{table(runs)}\n{file}")


if __name__ == "__main__":
    main()
