"""Recipes at full dimensions, beside what preflight says of them: memory of the device and seconds of each phase.

    python examples/benchmarks/recipes.py grpo_4b lora_4b --output examples/benchmarks/results/recipes.json
    python examples/benchmarks/recipes.py grpo_30b_ep4 --warm-up 1 --steps 2 --output result.json      # four GPUs

A case (recipe_cases.py) is a recipe with what the devices ask to be changed. Weights are random, every response has the
same length, and the prediction is that of `rlframe.tools.plan` for the same settings and this machine's devices. Memory
is what nvidia-smi says of each whole device 20 times a second, less what it says before the run has it: its peak within
a phase, over the steps that count, from the moment when the roles of the phase before have gone to sleep. What it is
until then, while one role leaves and the next comes, is `changes_bytes`. The prediction has what torch's allocator
reserves besides the tensors, which nvidia-smi sees too. The devices of a split run are those of the policy and then
those of the engines. Seconds are medians of the steps that count, of whole phases; the first `--warm-up` steps are not
counted. `idle` is the share of each whole phase in which no kernel ran on a device, as nvidia-smi says too. `own` has
what the processes themselves say of their memory, of their times and of tokens a second, medians too. Each case is
written when it ends.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

from async_rl import follow, stop
from device_memory import Memory, Span
from models_by_size import MODELS, make_model
from recipe_cases import CASES, Case
from weight_sync import machine

from rlframe.models.hub import EMBEDDED

HERE = Path(__file__).parent
WARM_UP, STEPS = 2, 3
PHASES = {
    "rollout": "generation",
    "reference": "logprobs",
    "old_logprobs": "logprobs",
    "prepare": "logprobs",
    "values": "critic",
    "critic": "critic",
    "train": "train",
    "weight_sync": "weight sync",
}
"""Preflight's name of each phase of a run's timeline."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=CASES, nargs="+")
    parser.add_argument("--output", type=Path, default=HERE / "results/recipes.json")
    parser.add_argument("--logs", type=Path, help="folder for the messages of the runs")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of one case, its start included")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps that are counted")
    parser.add_argument("--device", help="kind of device of the prediction, else this machine's")
    parser.add_argument("--set", nargs="*", default=[], help="key=value for rlframe's configuration, in every case")
    arguments = parser.parse_args()
    result = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"cases": {}}
    for name in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            logs = arguments.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            result["cases"][name] = measure(CASES[name], Path(folder), logs / f"{name}.log", arguments)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(table(result["cases"]) + "\n")
        print(name, json.dumps(result["cases"][name]), flush=True)
    print(table(result["cases"]))


def measure(case: Case, folder: Path, log: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what was predicted and measured of one case."""
    warm_up, count = arguments.warm_up, arguments.steps
    settings = [*overrides(case, folder, steps=warm_up + count), *arguments.set]
    predicted = planned(case, settings, folder, arguments.device)
    with Memory() as memory:
        run = watch(case.recipe, settings, folder, log=log, limit_s=arguments.limit_s, warm_up=warm_up, count=count)
    found: dict[str, Any] = {"machine": machine(), "case": asdict(case), "set": arguments.set}
    found |= {"rc": run.rc, "start_s": run.start_s}
    found["device"] = predicted["device"]
    found["steps"] = run.steps[warm_up:]
    counted = [row for row in run.timeline if row["step"] > warm_up]
    roles, changes = list(spans(counted, of="roles")), list(spans(counted, of="changes"))
    found["changes_bytes"] = [memory.peaks(index, changes) for index in memory.samples]
    found["idle"] = [memory.idle(index, spans(counted)) for index in memory.samples]
    found["own"] = own(run.steps[warm_up:], ("memory/", "time/", "throughput/"))
    devices = [
        paired(reserved, memory.peaks(index, roles))
        for reserved, index in zip(predicted["reserved"], memory.samples, strict=False)
    ]
    found["memory_bytes"], found["memory_of_other_devices"] = devices[0], devices[1:]
    return found | {"seconds": paired(predicted["seconds"], medians(counted))}


def paired(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Returns both values of each phase that was measured."""
    return {phase: {"predicted": predicted.get(phase), "measured": value} for phase, value in measured.items()}


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a run has written that was ended after its last counted step."""

    steps: list[dict[str, float]]
    """Metrics, those that are not counted included."""
    timeline: list[dict[str, Any]]
    rc: int | None
    start_s: float
    """Seconds from its command to its first phase."""


def watch(
    config: str,
    settings: list[str],
    folder: Path,
    *,
    log: Path,
    limit_s: float,
    warm_up: int = WARM_UP,
    count: int = STEPS,
) -> Watched:
    """Runs a configuration, whose output is `folder`/run, for `warm_up` + `count` steps.

    Args:
        log: file of its messages. The logs of its workers, its metrics and its timeline go into a folder of that name.
        limit_s: seconds after which it is ended, its start included.

    Raises:
        SystemExit: it did not get to two counted steps, or to the one that was asked for.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rlframe.main", "--config-name", config, *settings]
    begun = time.time()
    with log.open("w") as file:
        run = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        try:
            steps = list(follow(folder / "run/metrics.jsonl", run, count=warm_up + count, until=begun + limit_s))
        finally:
            stop(run)
            keep(folder / "run", log.with_suffix(""))
    if len(steps) < warm_up + min(count, 2):
        raise SystemExit(f"{log.stem}: {len(steps)} steps\n{log.read_text()[-6000:]}")
    timeline = [json.loads(line) for line in (folder / "run/timeline.jsonl").read_text().splitlines()]
    first = next(phase["start_s"] for row in timeline for phase in row["phases"])
    return Watched(steps=steps, timeline=timeline, rc=run.returncode, start_s=first - begun)


def keep(run: Path, folder: Path) -> None:
    """Copies the logs of a run's workers into a folder, and what it wrote of its steps, however few they are."""
    if (run / "logs").is_dir():
        copytree(run / "logs", folder, dirs_exist_ok=True)
        for name in ("metrics.jsonl", "timeline.jsonl"):
            if (run / name).exists():
                copyfile(run / name, folder / name)


def overrides(case: Case, folder: Path, *, steps: int = WARM_UP + STEPS) -> list[str]:
    """Returns the settings of a run of so many steps, and writes its model's folder and its data."""
    config = MODELS[case.model] | ({"num_hidden_layers": case.num_layers} if case.num_layers else {})
    model = make_model(config, folder / "model", words=config["vocab_size"])
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records(case, steps=steps)))
    found = {
        "output": folder / "run",
        "model.path": model,
        "model.random_init": "true",
        # The run is stopped after those that count, because its end would save a checkpoint.
        "steps": 1000,
        "prompts_per_step": case.prompts,
        "data.path": data,
        # Words that the tokenizer lacks, such as a recipe's system prompt, are its unknown token.
        "data.special_tokens_in_text": "true",
        "data.evaluation_count": 0,
        "data.evaluation_path": "null",
        "evaluation.every_steps": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.on_signal_s": 0,
        "cluster.preflight": "off",
    }
    if case.online:
        found |= {
            "data.max_prompt_tokens": case.prompt_tokens,
            "data.system_prompt": "null",
            "rollout.max_tokens": case.response_tokens,
            "rollout.min_tokens": case.response_tokens,
            "rollout.max_model_len": case.prompt_tokens + case.response_tokens,
            "reward.parts": f"{{noise:{{name:'{HERE / 'even_characters.py'}:score'}}}}",
        }
    if case.tools:
        copyfile(EMBEDDED / "qwen3_moe_tiny_tools/chat_template.jinja", folder / "model/chat_template.jinja")
        corpus = folder / "corpus.jsonl"
        corpus.write_text("".join(f'{{"title": "w{row}", "text": "{words(row, 100)}"}}\n' for row in range(1000)))
        found["environment.options.tools.search.options.corpus"] = corpus
    return [*(f"{key}={value}" for key, value in found.items()), *case.overrides]


def records(case: Case, *, steps: int) -> Iterable[dict[str, Any]]:
    """Yields rows of the case's lengths, in words that are a token each."""
    for row in range(case.prompts * (steps + 2)):
        text = {"prompt": words(row, case.prompt_tokens - 1), "answer": "w7", "solution": "w7"}
        text |= {"response": words(row + 1, case.response_tokens - 1)}
        text |= {
            "chosen": words(row + 2, case.response_tokens - 1),
            "rejected": words(row + 3, case.response_tokens - 1),
        }
        asked = {"dpo": ("prompt", "chosen", "rejected"), "reward": ("prompt", "chosen", "rejected")}
        keys = asked.get(
            case.recipe.split("_")[0], ("prompt", "answer", "solution") if case.online else ("prompt", "response")
        )
        yield {key: text[key] for key in keys}


def words(seed: int, count: int) -> str:
    """Returns `count` words of a token each, which differ from row to row. None begins like the special tokens w1 and
    w2, at which the tokenizer would cut it."""
    return " ".join(f"w{30_000 + (seed * 7919 + place * 104729) % 60_000}" for place in range(count))


def planned(case: Case, settings: list[str], folder: Path, device: str | None) -> dict[str, Any]:
    """Returns the device that preflight plans for, the bytes of each kind of device, the policy's first, and the
    seconds of the step, by phase."""
    file = folder / "plan.json"
    lengths = ["--prompt-tokens", str(case.prompt_tokens), "--response-tokens", str(case.response_tokens)]
    command = [sys.executable, "-m", "rlframe.tools.plan", "--json", str(file), *lengths]
    command += ["--device", device] if device else []
    command += ["--config-name", case.recipe, *settings]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode or not file.exists():
        raise SystemExit(f"{case.recipe}: no plan\n{done.stdout}{done.stderr[-3000:]}")
    plan = json.loads(file.read_text())
    return {
        "device": plan["device"],
        "reserved": [each["reserved"] for each in plan["devices"]],
        "seconds": plan["seconds"],
    }


def environment() -> dict[str, str]:
    """Returns the environment of a command of this checkout."""
    return os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"}


def spans(timeline: Iterable[Mapping[str, Any]], *, of: str = "phases") -> Iterator[Span]:
    """Yields preflight's name, begin and end of every phase.

    Args:
        of: "phases" for the whole phases, "changes" for their begin, in which roles go to sleep and wake, and "roles"
            for the rest.
    """
    for row in timeline:
        for phase in row["phases"]:
            if phase["name"] in PHASES:
                start, end = phase["start_s"], phase["end_s"]
                ready = phase.get("ready_s", start)
                yield PHASES[phase["name"]], ready if of == "roles" else start, ready if of == "changes" else end


def own(steps: Sequence[Mapping[str, Any]], areas: tuple[str, ...] = ("memory/", "time/")) -> dict[str, float]:
    """Returns the medians of the metrics of memory and of time, or of other areas."""
    names = {name for step in steps for name in step if name.startswith(areas)}
    return {name: statistics.median(step[name] for step in steps if name in step) for name in sorted(names)}


def medians(timeline: list[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the median over steps of each phase's seconds."""
    steps = []
    for row in timeline:
        seconds: dict[str, float] = {}
        for phase, start, end in spans([row]):
            seconds[phase] = seconds.get(phase, 0.0) + end - start
        if seconds:
            steps.append(seconds)
    names = {name for seconds in steps for name in seconds}
    return {name: statistics.median(seconds.get(name, 0.0) for seconds in steps) for name in sorted(names)}


def table(cases: Mapping[str, Any]) -> str:
    """Returns the comparison in Markdown."""
    lines = [
        "| case | phase | GB predicted | measured | error | s predicted | measured | error |",
        "|---|---|" + "---:|" * 6,
    ]
    for name, case in cases.items():
        for phase in case["seconds"]:
            memory, seconds = case["memory_bytes"].get(phase), case["seconds"][phase]
            cells = [name, phase, *compared(memory, 1e9, ".1f"), *compared(seconds, 1.0, ".2f")]
            lines.append(f"| {' | '.join(cells)} |")
        for device in case.get("memory_of_other_devices", ()):
            lines += [
                f"| {name}, engines' device | {phase} | {' | '.join(compared(memory, 1e9, '.1f'))} | - | - | - |"
                for phase, memory in device.items()
            ]
    return "\n".join(lines)


def compared(pair: Mapping[str, float | None] | None, unit: float, digits: str) -> list[str]:
    """Returns predicted, measured and relative error for a table."""
    if pair is None:
        return ["-"] * 3
    predicted, value = pair["predicted"], pair["measured"]
    error = f"{100 * (predicted / value - 1):+.1f} %" if predicted and value else "-"
    return ["-" if number is None else f"{number / unit:{digits}}" for number in (predicted, value)] + [error]


if __name__ == "__main__":
    main()
