"""Preflight beside what is measured, case after case: training steps of preflight.py and whole recipes of recipes.py.

    CUDA_VISIBLE_DEVICES=0 python examples/benchmarks/fit.py run one --output fit_0.json
    CUDA_VISIBLE_DEVICES=1 python examples/benchmarks/fit.py run other --output fit_1.json
    python examples/benchmarks/fit.py run both --output fit_2.json
    python examples/benchmarks/fit.py table fit_?.json --output examples/benchmarks/results/fit.json

Each case is a process of its own with a limit of time, so that the next one runs whatever became of it: an error is
kept in its place. Results are written after every case. Only cases of FROZEN are taken, which were chosen after the
constants of rlframe/run/preflight/constants.py were frozen, so that each of them is a blind test. `predict` writes what
is predicted for a kind of device without any: results/fit_predicted.json was committed before the first measurement.

A row has the peak of memory and the seconds of each phase that takes one. Memory of a training step is the peak of
torch's tensors, that of a recipe what nvidia-smi says. Of a recipe's phases, those below SHORT_S are listed and are
compared as a part of the step, whose seconds are the sum.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import preflight
import recipes
from models_by_size import MODELS
from recipe_cases import FROZEN

from rlframe.run.preflight.devices import KINDS, Accelerator

HERE = Path(__file__).parent
PLANS = {
    "one": ("4b_even", "grpo_4b_80", "8b_lora_64", "30b_cut_5"),
    "other": ("1p7b", "ppo_1p7b_80", "4b_blocks_fp8", "dpo_4b_80"),
    "both": ("grpo_4b_split", "8b_t2_80"),
    "one_more": ("lora_4b_80",),
    "other_more": ("sft_4b_80", "reward_model_1p7b_80"),
    "both_more": ("30b_cut_ep2",),
}
"""Cases by the devices that they need: lists for one device each, which take about as long, lists for two, and the same
of what is measured if time is left."""
SHORT_S = 0.5
"""Seconds of a phase below which it is not compared alone."""
MEMORY, SECONDS = 0.10, 0.25
"""Greatest relative errors that are asked for."""


def main() -> None:
    """Predicts, measures, or prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["predict", "run", "table"])
    parser.add_argument("names", nargs="*", help=f"run: cases, or {', '.join(PLANS)}; table: files of results")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("fit_logs"), help="folder for the messages of all processes")
    parser.add_argument("--limit-s", type=float, default=150.0, help="seconds of one case")
    parser.add_argument("--device", choices=KINDS, help="kind of device of the predictions, else this machine's")
    arguments = parser.parse_args()
    if arguments.task == "predict":
        written = {"device": arguments.device, "cases": predictions(KINDS[arguments.device])}
    elif arguments.task == "run":
        names = [case for name in arguments.names for case in PLANS.get(name, (name,))]
        written = run(names, arguments)
    else:
        files = [json.loads(Path(name).read_text()) for name in arguments.names]
        written = {"cases": {name: case for file in files for name, case in file["cases"].items()}}
        print(table(written["cases"]))
        arguments.output.with_suffix(".md").write_text(table(written["cases"]) + "\n")
    arguments.output.write_text(json.dumps(written, indent=1) + "\n")


def predictions(device: Accelerator) -> dict[str, dict[str, Any]]:
    """Returns the bytes and the seconds that are predicted of every case."""
    found = {}
    for name in (case for cases in PLANS.values() for case in cases):
        if fields := preflight.FROZEN.get(name):
            train = preflight.build(
                preflight.TrainConfig, {"max_tokens_per_microbatch": sum(lengths(fields))} | fields["train"]
            )
            layers = {"num_hidden_layers": fields["num_layers"]} if "num_layers" in fields else {}
            one = preflight.predict(
                MODELS[fields["model"]] | layers, train, lengths(fields), fields.get("microbatches", 2), device
            )
            found[name] = {
                "memory_bytes": [{"train": one.memory_bytes}],
                "seconds": {"train": one.train_s, "logprobs": one.logprobs_s},
            }
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = FROZEN[name]
            plan = recipes.planned(case, recipes.overrides(case, Path(folder)), Path(folder), device.name)
        found[name] = {"memory_bytes": plan["reserved"], "seconds": plan["seconds"]}
    return found


def lengths(fields: Mapping[str, Any]) -> list[int]:
    """Returns the tokens of the sequences of a micro-batch."""
    return list(fields.get("lengths", (8192, 4096, 2048, 1024, 512, 512)))


def run(names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the cases, each in a process of its own, and writes after each what all have said so far."""
    written: dict[str, Any] = {"cases": {}}
    for name in names:
        begun = time.time()
        written["cases"][name] = measured(name, arguments) | {"whole_s": time.time() - begun}
        arguments.output.write_text(json.dumps(written, indent=1) + "\n")
        print(f"{name}: {time.time() - begun:.0f} s", flush=True)
        print("\n".join(cells(name, written["cases"][name])), flush=True)
    return written


def measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of a case, or its error."""
    arguments.logs.mkdir(parents=True, exist_ok=True)
    log, output = arguments.logs / f"{name}.out", arguments.logs / f"{name}.json"
    output.unlink(missing_ok=True)
    program = ["preflight.py", "run"] if name in preflight.FROZEN else ["recipes.py"]
    command = [sys.executable, str(HERE / program[0]), *program[1:], name, "--output", str(output)]
    command += ["--device", arguments.device] if arguments.device else []
    if name not in preflight.FROZEN:
        command += ["--logs", str(arguments.logs), "--limit-s", str(arguments.limit_s - 30)]
    # Ranks load functions of these files by name.
    environment = recipes.environment()
    environment["PYTHONPATH"] = f"{HERE}:{environment['PYTHONPATH']}"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(arguments.limit_s)
        except subprocess.TimeoutExpired:
            end(process)
    if process.returncode or not output.exists():
        return {"error": f"exit status {process.returncode}\n{log.read_text()[-4000:]}"}
    return row(name, json.loads(output.read_text()))


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a case that takes too long, and what it started."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a case's program has written, in the form of both kinds of cases."""
    if name not in preflight.FROZEN:
        case = found["cases"][name]
        memory = [case["memory_bytes"], *case["memory_of_other_devices"]]
        kept = {key: case[key] for key in ("machine", "device", "start_s", "own", "changes_bytes")}
        return {"kind": "recipe", "memory_bytes": memory, "seconds": case["seconds"]} | kept
    (one,) = found["rows"]
    pairs = {key: {each: one[key][each] for each in ("predicted", "measured")} for key in (
        "memory_bytes", "train_s", "logprobs_s"
    )}  # fmt: skip
    kept = {key: one[key] for key in ("machine", "device", "gpus", "reserved_bytes", "all_train_s")}
    seconds = {"train": pairs["train_s"], "logprobs": pairs["logprobs_s"]}
    return {"kind": "training step", "memory_bytes": [{"train": pairs["memory_bytes"]}], "seconds": seconds} | kept


def table(cases: Mapping[str, Any]) -> str:
    """Returns the comparison in Markdown, with what is within the limits."""
    lines = [
        "| case | kind | device | GB predicted | measured | error | seconds | predicted | measured | error |",
        "|---|---|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for name, case in cases.items():
        lines += cells(name, case)
    within = [name for name, case in cases.items() if is_within(case)]
    named = f": {', '.join(within)}" if within else ""
    return "\n".join([*lines, "", f"{len(within)} of {len(cases)} cases are within the limits{named}."])


def cells(name: str, case: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a case: its fullest phase on each device beside the step, then the phases."""
    if "error" in case:
        yield f"| {name} | {case['error'].splitlines()[0]} |" + " - |" * 8
        return
    peaks = [worst(device) for device in case["memory_bytes"]]
    times = timed(case)
    for place in range(max(len(peaks), len(times))):
        memory = recipes.compared(peaks[place], 1e9, ".1f") if place < len(peaks) else ["", "", ""]
        seconds = ["", "", "", ""]
        if place < len(times):
            phase, pair = times[place]
            seconds = [phase, *recipes.compared(pair, 1.0, ".2f")]
        head = [name, case["kind"], case["device"]] if place == 0 else ["", "", ""]
        yield f"| {' | '.join([*head, *memory, *seconds])} |"


def worst(device: Mapping[str, Any]) -> dict[str, float]:
    """Returns the peak of a device over the phases, predicted and measured: what decides whether a run fits."""
    pairs = [pair for pair in device.values() if pair["predicted"] is not None]
    return {key: max(pair[key] for pair in pairs) for key in ("predicted", "measured")}


def timed(case: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Returns the seconds that are compared: of the step, if it has several phases, and of each phase."""
    known = {phase: pair for phase, pair in case["seconds"].items() if pair["predicted"] is not None}
    whole = {key: sum(pair[key] for pair in known.values()) for key in ("predicted", "measured")}
    step = [("step", whole)] if case["kind"] == "recipe" and len(known) > 1 else []
    return [*step, *known.items()]


def is_within(case: Mapping[str, Any]) -> bool:
    """Returns whether a case has all of its peaks and all of its seconds within the limits."""
    if "error" in case:
        return False
    memory = all(near(worst(device), MEMORY) for device in case["memory_bytes"])
    return memory and all(near(pair, SECONDS) for _, pair in timed(case) if pair["measured"] >= SHORT_S)


def near(pair: Mapping[str, float], limit: float) -> bool:
    """Returns whether a prediction is as near to what was measured as asked."""
    return abs(pair["predicted"] / pair["measured"] - 1) <= limit


if __name__ == "__main__":
    main()
