"""What each algorithm reaches from the same start: a table, a plot and a JSON file for each section.

    python examples/benchmarks/algorithms.py SECTION ... [--jobs N] [--seeds 3] [--cases NAME ...] [--smoke] [--set ...]

A case is a run of `rlframe.main` with the section's settings and its own, once for each seed. Jobs run side by side,
each on cores of its own with a Ray of its own; by default there is one for each core. A curve is the mean over the
seeds of a metric of the held-out evaluations, over the rollouts that training had sampled by then, those that were
dropped included (over steps, where nothing is sampled); the spread is the least and the greatest. `--smoke` cuts every
run down to see that it works. A section more is an entry of SECTIONS. The sections `preferences` and `distillation`,
which make their data or their teacher first, are scripts of their own, started with their defaults.
`engines` needs vLLM and SGLang.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from curves_svg import Point, draw, spread

from rlframe.tools.doctor import versions

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
TRIES, TOO_SLOW = 3, "The current node timed out during startup"
"""Ray 2.60 gives its own processes 30 s to start, which is not always enough where many jobs start at once."""
Settings = dict[str, Any]
"""Overrides by dotted key, as on the command line."""
Curve = list[tuple[float, float]]
"""Rollouts or steps, and the metric there, of one run."""
QUIET: Settings = {
    "cluster.device": "cpu",
    "logging.progress": False,
    "logging.tensorboard": False,
    "logging.samples_per_step": 0,
    "checkpoint.export": False,
    "checkpoint.every_steps": 0,
    "checkpoint.verify": False,
}
"""A run of which nothing but its metrics is wanted."""


@dataclass(frozen=True)
class Case:
    """One line of a plot."""

    config: str
    """Name of the configuration that it begins with."""
    settings: Settings = field(default_factory=dict)
    """On top of the section's."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Cases that begin alike and are measured alike."""

    title: str
    settings: Settings
    """Of every case."""
    cases: dict[str, Case]
    """What differs, by the name in table and plot."""
    metric: str
    """Key of metrics.jsonl whose curve is drawn."""
    smoke: Settings = field(default_factory=dict)
    """On top of everything, with --smoke."""
    over: str = "rollouts"
    """What the x axis counts: rollouts, or steps where nothing is sampled."""
    times: tuple[str, ...] = ()
    """Keys of metrics.jsonl of which the median step is told, seconds."""


RL = "grpo_qwen3_moe"
ONLINE = Section(
    title="Held-out arithmetic, greedy",
    # Four updates a batch, so that ratios leave 1 and algorithms differ in what they do then; one rank and one engine.
    settings={
        "steps": 120,
        "prompts_per_step": 64,
        "algorithm.group_size": 8,
        "train.num_minibatches": 4,
        "train.parallel": "d1",
        "train.optimizer.lr": 5e-4,
        "train.optimizer.warmup_steps": 10,
        "rollout.num_engines": 1,
        "reward.workers": 1,
        "evaluation.every_steps": 10,
    },
    cases={
        "GRPO": Case(RL, {"algorithm": "grpo"}),
        "Dr.GRPO": Case(RL, {"algorithm": "dr_grpo", "algorithm.constant_length": 8}),
        "DAPO": Case(RL, {"algorithm": "dapo"}),
        "GSPO": Case(RL, {"algorithm": "gspo"}),
        "CISPO": Case(RL, {"algorithm": "cispo"}),
        "SAPO": Case(RL, {"algorithm": "sapo"}),
        "RLOO": Case(RL, {"algorithm": "rloo"}),
        "REINFORCE++": Case(RL, {"algorithm": "reinforce_plus_plus"}),
        "REINFORCE++ baseline": Case(RL, {"algorithm": "reinforce_plus_plus_baseline"}),
        "PPO": Case(RL, {"algorithm": "ppo", "algorithm.critic_warmup_steps": 5, "critic.train.optimizer.lr": 1e-3}),
    },
    metric="evaluation/exact_match_mean",
    smoke={"steps": 2, "prompts_per_step": 8, "evaluation.every_steps": 1, "data.evaluation_count": 8},
)
OFFLINE: Settings = {"steps": 100, "train.parallel": "d1", "evaluation.every_steps": 10}
RIGHT_ANSWERS: Settings = {"model.random_init": "false", "data": "arithmetic", "prompts_per_step": 64}
SUPERVISED = Section(
    title="Negative log-likelihood of held-out tokens, nats",
    settings=OFFLINE | {"train.optimizer.lr": 1e-3, "train.optimizer.warmup_steps": 10},
    cases={
        "SFT": Case("sft_qwen3_moe_tiny", RIGHT_ANSWERS),
        "DFT": Case("sft_qwen3_moe_tiny", RIGHT_ANSWERS | {"algorithm.dft": "true"}),
        "pre-training": Case("pretrain_qwen3_moe_tiny", {"steps": 200, "train.optimizer.lr": 3e-3}),
    },
    metric="evaluation/nll_nats",
    smoke={"steps": 2, "evaluation.every_steps": 1},
    over="steps",
)
HEADS = Section(
    title="Held-out choices that are right",
    settings=OFFLINE,
    cases={
        "reward model": Case("reward_model_qwen3_moe_tiny"),
        "classification": Case("classification_qwen3_moe_tiny"),
        "reranker": Case("reranker_qwen3_moe_tiny"),
        "embedding": Case("embedding_qwen3_moe_tiny", {"steps": 200}),
    },
    metric="evaluation/accuracy",
    smoke={"steps": 2, "evaluation.every_steps": 1},
    over="steps",
)
SHORT: Settings = {"rollout.max_model_len": 128, "data.max_prompt_tokens": 64}
"""So that engines that reserve memory for the longest sequence have enough of it."""
ENGINES = Section(
    title="Held-out arithmetic, greedy, by engine",
    # The README's main job, with one engine.
    settings={"rollout.num_engines": 1, "evaluation.every_steps": 50},
    cases={
        "transformers": Case(RL, {"rollout": "transformers"}),
        "vllm": Case(RL, {"rollout": "vllm"} | SHORT),
        "sglang": Case(RL, {"rollout": "sglang"} | SHORT),
    },
    metric="evaluation/exact_match_mean",
    smoke={"steps": 2, "prompts_per_step": 8, "evaluation.every_steps": 1, "data.evaluation_count": 8},
    times=("time/step_s", "time/rollout_s", "time/train_s", "time/weight_sync_s"),
)
SECTIONS = {"online": ONLINE, "engines": ENGINES, "supervised": SUPERVISED, "heads": HEADS}
SCRIPTS = ("preferences", "distillation")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run came to."""

    curve: Curve
    seconds: float
    """From the start of the command to its end."""
    times: dict[str, float]
    """Seconds of the median step, by metric."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run."""

    section: Section
    case: str
    seed: int
    smoke: bool
    more: tuple[str, ...] = ()
    """Overrides that this machine needs."""

    def overrides(self) -> list[str]:
        """What follows --config-name on the command line, but for the output."""
        merged = QUIET | self.section.settings | self.section.cases[self.case].settings | {"seed": self.seed}
        merged |= self.section.smoke if self.smoke else {}
        return [f"{key}={value}" for key, value in merged.items()] + list(self.more)

    def run(self, cores: set[int]) -> Result:
        """Do it on `cores`."""
        # Of this thread, and so of the processes that it starts.
        os.sched_setaffinity(0, cores)
        started = time.monotonic()
        # Ray's sockets are in there, whose paths must not be long.
        with tempfile.TemporaryDirectory(prefix="rl") as folder:
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "RAY_TMPDIR": folder,
                "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(256 << 20),
            }
            config = self.section.cases[self.case].config
            command = [sys.executable, "-m", "rlframe.main", "--config-name", config, "output=run"]
            for _ in range(TRIES):
                done = subprocess.run(
                    [*command, *self.overrides()], cwd=folder, env=environment, capture_output=True, text=True
                )
                if TOO_SLOW not in done.stderr:
                    break
            if done.returncode:
                raise RuntimeError(f"{self.case}, seed {self.seed}: exit {done.returncode}:\n{done.stderr[-4000:]}")
            lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
        seconds = time.monotonic() - started
        found = {key: [line[key] for line in lines if key in line] for key in self.section.times}
        times = {key: median(values) for key, values in found.items() if values}
        return Result(curve=curve(lines, self.section), seconds=seconds, times=times)


def curve(lines: list[dict[str, float]], section: Section) -> Curve:
    """The section's metric over what its x axis counts, from the lines of metrics.jsonl."""
    found, x = [], 0.0
    for line in lines:
        if section.over == "steps":
            x = line["step"]
        elif "rollout/sampled" in line:
            x += line["rollout/sampled"]
        if section.metric in line:
            found.append((x, line[section.metric]))
    return found


def measure(jobs: list[Job], *, side_by_side: int) -> list[Result | None]:
    """What each job came to, in order, None where it failed; `side_by_side` of them at a time, each with its share of
    the cores."""
    cores = sorted(os.sched_getaffinity(0))
    places: queue.Queue[set[int]] = queue.Queue()
    for place in range(side_by_side):
        places.put(set(cores[place::side_by_side]) or {cores[place % len(cores)]})

    def work(job: Job) -> Result | None:
        place = places.get()
        try:
            result = job.run(place)
        except RuntimeError as error:
            # One that fails must not take the others with it.
            print(error, file=sys.stderr, flush=True)
            return None
        finally:
            places.put(place)
        reached = f"{result.curve[-1][1]:.4f} after {result.seconds:.0f} s"
        print(f"{job.case:<22} seed {job.seed}: {reached} {result.times or ''}", flush=True)
        return result

    with ThreadPoolExecutor(side_by_side) as pool:
        return list(pool.map(work, jobs))


def at(curve: Curve, x: float) -> float:
    """The curve's value at `x`: on the straight line between the points about it, the last one beyond the end."""
    for (left, before), (right, after) in zip(curve, curve[1:], strict=False):
        if x <= right:
            return before + (after - before) * (x - left) / (right - left)
    return curve[-1][1]


def over_seeds(curves: list[Curve]) -> list[Point]:
    """Mean, least and greatest of a case's runs, at the x of its first."""
    points = []
    for x, _ in curves[0]:
        values = [at(each, x) for each in curves]
        points.append((x, fmean(values), min(values), max(values)))
    return points


def table(section: Section, curves: dict[str, list[Curve]]) -> str:
    """Markdown: what each case began with, where it was when the first of them ended, and its own end."""
    common = min(each[-1][0] for runs in curves.values() for each in runs)
    rows = [
        f"| case | start | at {common:,.0f} {section.over} | at its end | {section.over} at its end |",
        "|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        start, shared, end = ([at(each, x) for each in runs] for x in (0.0, common, max(each[-1][0] for each in runs)))
        last = fmean(each[-1][0] for each in runs)
        rows.append(f"| {name} | {fmean(start):.3f} | {spread(shared)} | {spread(end)} | {last:,.0f} |")
    return "\n".join(rows)


def times_table(section: Section, results: dict[str, list[Result]]) -> str:
    """Markdown: how long each case took, and its median step, in the mean over its seeds."""
    names = [key.removeprefix("time/").removesuffix("_s") for key in section.times]
    rows = [f"| case | whole run, s | {' | '.join(f'{name}, s' for name in names)} |", "|---" * (len(names) + 2) + "|"]
    for name, runs in results.items():
        times = [fmean(each.times[key] for each in runs) for key in section.times]
        rows.append(
            f"| {name} | {fmean(each.seconds for each in runs):.0f} | {' | '.join(f'{s:.3f}' for s in times)} |"
        )
    return "\n".join(rows)


def report(name: str, section: Section, results: dict[str, list[Result]], *, more: list[str], smoke: bool) -> None:
    """Print the tables; write them with the numbers and the plot to the results, or beside them for a smoke run."""
    folder = Path(tempfile.mkdtemp()) if smoke else RESULTS
    curves = {case: [each.curve for each in runs] for case, runs in results.items()}
    text = table(section, curves) + ("\n\n" + times_table(section, results) if section.times else "")
    record = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "settings": section.settings,
        "set": more,
        "cases": {
            case: {
                **asdict(section.cases[case]),
                "mean_seconds": round(fmean(each.seconds for each in runs), 1),
                "curves": curves[case],
                **({"median_step_seconds": [each.times for each in runs]} if section.times else {}),
            }
            for case, runs in results.items()
        },
    }
    (folder / f"algorithms_{name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (folder / f"algorithms_{name}.md").write_text(text + "\n", encoding="utf-8")
    drawn: dict[str, Sequence[Point]] = {case: over_seeds(runs) for case, runs in curves.items()}
    draw(folder / f"algorithms_{name}.svg", drawn, title=section.title, x_label=section.over, y_label=section.metric)
    print(f"{text}\n{folder}/algorithms_{name}.json, .md, .svg")


def main() -> None:
    """Run the sections and report each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SECTIONS, *SCRIPTS]
    parser.add_argument("sections", nargs="+", choices=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="side by side")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides that this machine needs")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.sections:
        if name in SCRIPTS:
            subprocess.run([sys.executable, HERE / f"{name}.py"], check=True)
            continue
        section = SECTIONS[name]
        cases = arguments.cases or [*section.cases]
        jobs = [
            Job(section=section, case=case, seed=seed, smoke=arguments.smoke, more=tuple(arguments.set))
            # The seeds of a case are far apart, so that the slowest case does not come last alone.
            for seed in range(arguments.seeds)
            for case in cases
        ]
        measured = measure(jobs, side_by_side=min(arguments.jobs, len(jobs)))
        done = [(job.case, result) for job, result in zip(jobs, measured, strict=True) if result]
        results = {case: found for case in cases if (found := [result for name, result in done if name == case])}
        report(name, section, results, more=arguments.set, smoke=arguments.smoke)


if __name__ == "__main__":
    main()
