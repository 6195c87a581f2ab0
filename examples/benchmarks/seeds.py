"""Curves of one recipe over several seeds: a result as JSON, and a figure, from the folders of finished runs.

    python examples/benchmarks/seeds.py runs/smollm2/0 runs/smollm2/1 runs/smollm2/2 --output smollm2_135m_seeds.json

The figure lies beside the JSON, with the suffix .svg: the greedy held-out reward, and the mean reward of the samples of
each ten steps, both as the mean of the runs with a band from the least to the greatest.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from curves_svg import Point, draw, spread

HELD_OUT, SAMPLED = "evaluation/reward_mean", "reward/mean"
EVERY = 10
"""Steps whose sampled rewards are one point of the figure."""
KEPT = (SAMPLED, "reward/flat_groups_fraction", "rollout/response_tokens_mean", "train/entropy_nats",
        "rollout/logprob_gap_mean_nats", "time/rollout_s", "time/train_s", "time/step_s")  # fmt: skip
"""Metrics that the result has of every EVERY-th step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, one for each seed")
    parser.add_argument("--title", default="", help="title of the figure")
    parser.add_argument("--machine", default="", help="what the runs ran on")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    runs = [read(run) for run in arguments.runs]
    result = {"machine": arguments.machine, "title": arguments.title, "runs": runs}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    curves = {"held out, greedy": points([run["held_out"] for run in runs]),
              "samples": points([blocks(run["sampled"]) for run in runs])}  # fmt: skip
    draw(arguments.output.with_suffix(".svg"), curves, title=arguments.title, x_label="step", y_label="fraction right")
    print("last held out:", spread([run["held_out"][-1][1] for run in runs]))


def read(folder: Path) -> dict[str, Any]:
    """Returns the seed, curves and kept metrics of one run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step_s" in row]
    return {
        "seed": yaml.safe_load((folder / "config.yaml").read_text())["seed"],
        "held_out": [(row["step"], row[HELD_OUT]) for row in rows if HELD_OUT in row],
        "sampled": [(row["step"], round(row[SAMPLED], 4)) for row in steps],
        "steps": [{"step": row["step"]} | {key: round(row[key], 4) for key in KEPT} for row in steps[::EVERY]],
    }


def blocks(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the means of EVERY values in a row, at the last step of each."""
    whole = [curve[index : index + EVERY] for index in range(0, len(curve), EVERY)]
    return [(block[-1][0], fmean(value for _, value in block)) for block in whole]


def points(curves: list[list[tuple[int, float]]]) -> list[Point]:
    """Returns the mean, the least and the greatest value of the curves at each step that all of them have."""
    found = []
    for each in zip(*curves, strict=True):
        (step,), values = {x for x, _ in each}, [y for _, y in each]
        found.append((step, fmean(values), min(values), max(values)))
    return found


if __name__ == "__main__":
    main()
