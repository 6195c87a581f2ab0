"""The first steps of one recipe under several parallel layouts: they must differ by float noise only.

    python examples/benchmarks/layout_curves.py [--steps 3] [--layouts d2e2 d1t2 ...] [key=value ...]

`key=value` are overrides of the configuration. Each layout is a run of its own, with the same seed, so with the same
prompts. Step 1 is sampled from the model as loaded, so its tokens and rewards must be equal. From step 2 on the weights
differ by the order in which floats were added; as the random numbers of every token are the same, its text differs only
where that noise carries a token's probability across its random number. Losses, gradient norms and the gap between the
engine's and the trainer's logprobs are compared as numbers, relative to those of the first layout.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAYOUTS = ["d2e2", "d1t2", "d1p2", "d2", "d1"]
METRICS = ["reward/mean", "train/loss", "train/grad_norm", "rollout/logprob_gap_max_nats"]
Steps = list[dict[str, Any]]
"""By step: the METRICS, and `samples`, the [R] rollouts in order as (prompt id, response)."""


def measure(folder: Path, layout: str, *, steps: int, config_name: str, overrides: list[str]) -> Steps:
    """The steps of one run, whose output is left in `folder`."""
    given = [
        f"output={folder}", f"steps={steps}", f"train.parallel={layout}", "logging.samples_per_step=1000000",
        "logging.progress=false", "logging.tensorboard=false", "checkpoint.export=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rlframe.main", "--config-name", config_name, *overrides, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{layout} ended with {done.returncode}:\n{done.stderr}")
    return read(folder, steps)


def read(folder: Path, steps: int) -> Steps:
    """What a run wrote about its first steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    metrics = {line["step"]: {key: line[key] for key in METRICS} for line in lines if "train/loss" in line}
    rollouts: dict[int, list[tuple[str, str]]] = {}
    for sample in samples:
        # What a step trained on was sampled at the version before it; what it evaluates, at its own.
        if sample["versions"] == [sample["step"] - 1]:
            rollouts.setdefault(sample["step"], []).append((sample["id"], sample["response"]))
    return [metrics[step] | {"samples": rollouts[step]} for step in range(1, steps + 1)]


def compare(curve: Steps, baseline: Steps) -> Steps:
    """By step: the relative difference of each metric, and the part of the rollouts with the same text."""
    compared = []
    for ours, theirs in zip(curve, baseline, strict=True):
        row = {key: abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 1e-12) for key in METRICS[:3]}
        same = sum(mine == other for mine, other in zip(ours["samples"], theirs["samples"], strict=True))
        prompts = [name for name, _ in ours["samples"]] == [name for name, _ in theirs["samples"]]
        compared.append(row | {"same_prompts": prompts, "same_text": same / len(theirs["samples"])})
    return compared


def table(curves: dict[str, Steps]) -> str:
    """One line per step and layout."""
    baseline = next(iter(curves.values()))
    rows = ["step layout  reward/mean  train/loss    grad_norm   gap max nats  same text   d loss  d grad_norm"]
    for step in range(len(baseline)):
        for layout, curve in curves.items():
            here, noise = curve[step], compare(curve, baseline)[step]
            rows.append(
                f"{step + 1:>4} {layout:<6} {here['reward/mean']:>12.6f} {here['train/loss']:>+12.8f} "
                f"{here['train/grad_norm']:>11.7f} {here['rollout/logprob_gap_max_nats']:>13.1e} "
                f"{noise['same_text']:>10.1%} {noise['train/loss']:>9.1e} {noise['train/grad_norm']:>9.1e}"
            )
    return "\n".join(rows)


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", default="grpo_qwen3_moe")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    parser.add_argument("overrides", nargs="*", help="key=value for the configuration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            layout: measure(
                Path(folder) / layout.replace("|", "_"),
                layout,
                steps=arguments.steps,
                config_name=arguments.config_name,
                overrides=arguments.overrides,
            )  # fmt: skip
            for layout in arguments.layouts
        }
    baseline = next(iter(curves.values()))
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": arguments.config_name,
        "overrides": arguments.overrides,
        "versions": {name: version(name) for name in ("rlframe", "torch", "transformers", "megatron-core", "ray")},
        "steps": {layout: [{key: each[key] for key in METRICS} for each in curve] for layout, curve in curves.items()},
        "relative_to_" + arguments.layouts[0]: {layout: compare(curve, baseline) for layout, curve in curves.items()},
    }
    print(table(curves))
    arguments.results.mkdir(parents=True, exist_ok=True)
    file = arguments.results / "layout_curves.json"
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
