"""Seconds of a whole GRPO step, by phase, and peak memory: rlframe, TRL and verl on one GPU, one model folder.

    python examples/benchmarks/step_vs_peers.py rlframe trl verl
    python examples/benchmarks/step_vs_peers.py rlframe trl verl --workload tail
    python examples/benchmarks/step_vs_peers.py verl_async --workload async --model qwen3_1p7b     # two GPUs

peers/README.md says how TRL and verl are installed. All sample with vLLM on the GPU that trains, in bfloat16 with
float32 main weights and moments, without a reference, without old logprobs from the trainer, one optimizer step a
batch. The workloads are in peers/inputs.py: `equal` forces 512 tokens behind prompts of 170, `tail` lognormal lengths
behind prompts of 4,096, the k-th response to a prompt as long on every side. Every side's tokens are counted and
compared.

Each side's settings (peers/settings.py) are the fastest that it documents and that fit 80 GB; `--set SIDE:KEY=VALUE`
changes one. Phases: `rollout`, `train` and `weight_sync`; `step` is the whole. Memory is what nvidia-smi says of the
first device 20 times a second, its peak over the counted steps, as a whole and by phase. verl says how long its phases
took, not when: they follow each other in the order of VERL_PHASES. A side's result is written after every step, to a
file of its own, so that two sides may run on two GPUs at once; without a side the script makes the inputs, and prints
what there is.

`verl_async` is verl's fully asynchronous mode, one GPU trains and one samples, on the workload of async_rl.py: its
`samples_per_s` stands beside that of async_rl.py's cases with the same model.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from async_rl import follow, stop
from device_memory import Memory, peaks
from models_by_size import MODELS
from peers.inputs import WORKLOADS, Workload, make_inputs
from peers.settings import rlframe_settings, trl_settings, verl_async_settings, verl_settings
from recipes import environment
from step_vs_trl import TrlSide
from weight_sync import machine

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
PACKAGES = (
    "trl",
    "verl",
    "vllm",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "ray",
    "mbridge",
    "tensordict",
)
Step = dict[str, Any]
"""Seconds by phase, `step` for the whole; `spans` of phases; `at`, when it ended; tokens."""


def main() -> None:
    arguments = read_arguments()
    workload = WORKLOADS[arguments.workload]
    count = arguments.warm_up + arguments.steps
    folder = arguments.folder / f"{arguments.model}_{arguments.workload}"
    make_inputs(folder, arguments.model, workload, count + 4)
    arguments.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.sides:
        wait_for_memory(arguments)
        try:
            measure(name, workload, folder, arguments)
        except RuntimeError as error:
            # The sides before it are written, and those after it do not depend on it.
            failed.append(name)
            print(f"{name}: {error}", flush=True)
    print(table(arguments), flush=True)
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed; what was measured of them is in {arguments.output}")


def measure(name: str, workload: Workload, folder: Path, arguments: argparse.Namespace) -> None:
    """Runs a side and writes what is known of it after each step.

    Raises:
        RuntimeError: the side ended, or time was up, before its last step.
    """
    count = arguments.warm_up + arguments.steps
    begun = time.time()
    with measured_memory(arguments) as samples:
        for steps in collected(name, workload, folder, count, arguments):
            start_s = steps[0]["at"] - steps[0]["step"] - begun
            found = figures(steps, samples, arguments) | {"start_s": start_s}
            file = arguments.output / f"{arguments.model}_{arguments.workload}_{name}.json"
            file.write_text(json.dumps(found, indent=1) + "\n")


def wait_for_memory(arguments: argparse.Namespace) -> None:
    """Waits until the processes of the side before have given the GPU's memory back, at most FREE_S."""
    query = ["nvidia-smi", "-i", str(arguments.gpu), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    deadline = time.monotonic() + FREE_S
    while arguments.device == "cuda" and time.monotonic() < deadline:
        if float(subprocess.run(query, check=True, capture_output=True, text=True).stdout) < FREE_MIB:
            return
        time.sleep(0.5)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", choices=[*SIDES, []], nargs="*", metavar="side", help=", ".join(SIDES))
    parser.add_argument("--workload", choices=WORKLOADS, default="equal")
    parser.add_argument("--model", choices=MODELS, default="qwen3_1p7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU of all sides but verl_async")
    parser.add_argument("--warm-up", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted")
    parser.add_argument("--limit-s", type=float, default=220.0, help="seconds of one side, its start included")
    parser.add_argument("--python", action="append", default=[], help="SIDE=path of a Python for trl or verl")
    parser.add_argument("--set", action="append", default=[], help="SIDE:KEY=VALUE, a setting of one side")
    parser.add_argument("--folder", type=Path, default=Path("peers_inputs"), help="folder of model, prompts and runs")
    parser.add_argument("--logs", type=Path, default=Path("peers_logs"), help="folder for the messages of the runs")
    parser.add_argument("--output", type=Path, default=HERE / "results/step_vs_peers", help="folder of results")
    arguments = parser.parse_args()
    arguments.folder, arguments.logs = arguments.folder.resolve(), arguments.logs.resolve()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    return arguments


def python(arguments: argparse.Namespace, side: str) -> str:
    """Returns the Python of a side, this one unless another was given."""
    return dict(each.split("=", 1) for each in arguments.python).get(side, sys.executable)


def one_gpu(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the environment of a side that sees one GPU."""
    return environment() | {
        "CUDA_VISIBLE_DEVICES": str(arguments.gpu) if arguments.device == "cuda" else "",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def chosen(arguments: argparse.Namespace, side: str) -> dict[str, str]:
    """Returns the settings that the command line changes for a side."""
    mine = [each.removeprefix(f"{side}:") for each in arguments.set if each.startswith(f"{side}:")]
    return dict(each.split("=", 1) for each in mine)


@contextmanager
def measured_memory(arguments: argparse.Namespace) -> Iterator[list[tuple[float, float]]]:
    """Yields a list that grows while the block runs, empty without a GPU."""
    if arguments.device == "cpu" or not shutil.which("nvidia-smi"):
        yield []
        return
    with Memory(str(arguments.gpu)) as memory:
        yield memory.samples[str(arguments.gpu)]


def collected(
    name: str, workload: Workload, folder: Path, count: int, arguments: argparse.Namespace
) -> Iterator[list[Step]]:
    """Yields all steps so far, after each one.

    Raises:
        RuntimeError: the side ended, or time was up, before its last step; with the end of its messages.
    """
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    steps: list[Step] = []
    for step in SIDES[name](workload, folder, run, count, arguments):
        steps.append(step)
        print(name, json.dumps({key: value for key, value in step.items() if key != "spans"}), flush=True)
        yield steps
    if len(steps) < count:
        raise RuntimeError(f"{len(steps)} of {count} steps\n{(arguments.logs / f'{name}.log').read_text()[-6000:]}")


def rlframe(workload: Workload, folder: Path, run: Path, count: int, arguments: argparse.Namespace) -> Iterator[Step]:
    """Yields the steps of `rlframe.main`."""
    settings = rlframe_settings(workload, folder, run / "run", cuda=arguments.device == "cuda")
    settings |= chosen(arguments, "rlframe")
    command = [sys.executable, "-m", "rlframe.main", "--config-name", "grpo_qwen3_moe"]
    command += [key if value is None else f"{key}={value}" for key, value in settings.items()]
    for record in followed(command, run / "run/metrics.jsonl", "rlframe", count, arguments, one_gpu(arguments)):
        lines = map(json.loads, (run / "run/timeline.jsonl").read_text().splitlines())
        phases = next((line["phases"] for line in lines if line["step"] == record["step"]), [])
        seconds = {key: record.get(f"time/{key}_s", 0.0) for key in ("step", *PHASES)}
        yield seconds | {
            "at": record["at"],
            "response_tokens": record["rollout/response_tokens_mean"] * workload.responses,
            # Whether all that is fast computes the model that is trained.
            "logprob_gap_mean_nats": record["rollout/logprob_gap_mean_nats"],
            "spans": [(each["name"], each.get("ready_s", each["start_s"]), each["end_s"]) for each in phases],
        }


def trl(workload: Workload, folder: Path, run: Path, count: int, arguments: argparse.Namespace) -> Iterator[Step]:
    """Yields the steps of TRL's GRPOTrainer."""
    settings = trl_settings(workload, cuda=arguments.device == "cuda")
    settings |= {key: json.loads(value) for key, value in chosen(arguments, "trl").items()}
    options: dict[str, Any] = {
        "model": folder / "model",
        "prompts": folder / "prompts.jsonl",
        "prompts-per-step": workload.prompts,
        "group-size": workload.group,
        "response-tokens": workload.response_tokens,
        "threads": len(os.sched_getaffinity(0)),
        "lr": 1e-6,
        "steps": count,
        "output": run / "trl",
        "device": arguments.device,
        "settings": json.dumps(settings),
    }
    if workload.mean_tokens:
        options["lengths"] = folder / "lengths.json"
    with ExitStack() as stack:
        stack.callback(lambda: shutil.copy(run / "trl.log", arguments.logs / "trl.log"))
        side = TrlSide(
            python(arguments, "trl"), options, run, stack, environment=one_gpu(arguments), limit_s=arguments.limit_s
        )
        for _ in range(count):
            answer = side.step()
            yield {
                "step": answer["step"],
                "rollout": answer["generation"],
                "train": answer["forward"] + answer["backward_and_optimizer"],
                "weight_sync": answer["weight_sync"],
                "at": answer["spans"][-1][2],
                "response_tokens": float(answer["response_tokens"]),
                "spans": [(TRL_PHASES[phase], *times) for phase, *times in answer["spans"] if phase in TRL_PHASES],
            }


def verl(workload: Workload, folder: Path, run: Path, count: int, arguments: argparse.Namespace) -> Iterator[Step]:
    """Yields the steps of verl's trainer."""
    settings = verl_settings(workload, folder, run, steps=count) | chosen(arguments, "verl")
    command = [python(arguments, "verl"), "-m", "verl.trainer.main_ppo"]
    for record in verl_records(command, settings, "verl", folder, run, count, arguments):
        seconds = {key: record.get(f"timing_s/{name}", 0.0) for key, name in VERL_PHASES.items()}
        spans, begin = [], record["at"] - record["timing_s/step"]
        for key, value in seconds.items():
            spans.append((key, begin, begin + value))
            begin += value
        yield seconds | {
            "step": record["timing_s/step"],
            "at": record["at"],
            "response_tokens": record["response_length/mean"] * workload.responses,
            "allocated_gib": record.get("perf/max_memory_allocated_gb"),
            "reserved_gib": record.get("perf/max_memory_reserved_gb"),
            "spans": spans,
        }


def verl_async(
    workload: Workload, folder: Path, run: Path, count: int, arguments: argparse.Namespace
) -> Iterator[Step]:
    """Yields the steps of verl's fully asynchronous trainer: from the end of one to the end of the next."""
    settings = verl_async_settings(workload, folder, run, steps=count) | chosen(arguments, "verl_async")
    command = [python(arguments, "verl"), "-m", "verl.experimental.fully_async_policy.fully_async_main"]
    before = None
    for record in verl_records(command, settings, "verl_async", folder, run, count, arguments):
        # The first step ends what was begun before it.
        step = record["at"] - before if before else record["timing_s/step"]
        before = record["at"]
        yield {
            "step": step,
            "train": record.get("timing_s/update_actor", 0.0),
            "waits": record.get("timing_s/gen", 0.0),
            "weight_sync": record.get("timing_s/param_sync", 0.0),
            "samples_per_s": workload.responses / step,
            "at": record["at"],
            "response_tokens": record.get("response_length/mean", 0.0) * workload.responses,
            "all": {key: value for key, value in record.items() if key.startswith(("timing_s/", "fully_async/"))},
            "spans": [],
        }


def verl_records(
    command: list[Any],
    settings: dict[str, Any],
    name: str,
    folder: Path,
    run: Path,
    count: int,
    arguments: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Yields what verl logs of each step, with the time `at` which it was written."""
    variables = one_gpu(arguments)
    if name == "verl_async":
        # It takes two GPUs: those that this process sees.
        del variables["CUDA_VISIBLE_DEVICES"]
        if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            variables["CUDA_VISIBLE_DEVICES"] = seen
    variables |= {
        "PYTHONPATH": f"{PEERS}:{HERE}:{variables['PYTHONPATH']}",
        "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl"),
        "STEP_VS_PEERS_LENGTHS": str(folder / "lengths.json"),
    }
    command = [*command, *(f"{key}={value}" for key, value in settings.items())]
    reading = {"read": verl_metrics, "key": "timing_s/step"}
    return followed(command, run / "metrics.jsonl", name, count, arguments, variables, **reading)


def verl_metrics(line: str) -> dict[str, Any]:
    """Returns the metrics of a line of verl's log."""
    record = json.loads(line)
    return record["data"] | {"step": record["step"]}


def followed(
    command: list[Any],
    file: Path,
    name: str,
    count: int,
    arguments: argparse.Namespace,
    variables: dict[str, str],
    **reading: Any,
) -> Iterator[dict[str, Any]]:
    """Runs a command and yields its metrics as they come. Ends it when they are enough, or time is up."""
    begun = time.time()
    with (arguments.logs / f"{name}.log").open("w") as log:
        run = subprocess.Popen(
            [str(part) for part in command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=arguments.folder,
            start_new_session=True,
        )
        try:
            yield from follow(file, run, count=count, until=begun + arguments.limit_s, **reading)
        finally:
            stop(run)


def figures(steps: list[Step], samples: list[tuple[float, float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns medians and means over the counted steps, and the peaks of memory within them."""
    counted = steps[arguments.warm_up :] or steps
    names = [key for key, value in counted[0].items() if isinstance(value, float) and key != "at"]
    begin, end = counted[0]["at"] - counted[0]["step"], counted[-1]["at"]
    spans = [tuple(span) for step in counted for span in step["spans"]]
    return {
        "machine": machine(),
        "versions": {name: installed(name) for name in PACKAGES},
        "gpu": arguments.gpu,
        "set": arguments.set,
        "counted": len(steps) - arguments.warm_up,
        "median": {key: statistics.median(step[key] for step in counted) for key in names},
        # Steps that take turns at being long and short, as with a lag, have no typical one.
        "mean": {key: statistics.fmean(step[key] for step in counted) for key in names},
        "memory_bytes": peaks(samples, [("all", begin, end), *spans]),
        "steps": steps,
    }


def installed(name: str) -> str | None:
    """Returns the version of a package of this Python."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def table(arguments: argparse.Namespace) -> str:
    """Returns the sides of a workload that have been measured, a line each."""
    prefix = f"{arguments.model}_{arguments.workload}_"
    found = {side: arguments.output / f"{prefix}{side}.json" for side in SIDES}
    cases = {side: json.loads(file.read_text()) for side, file in found.items() if file.exists()}
    ours = cases.get("rlframe")
    lines = []
    for name, case in cases.items():
        median = case["median"]
        seconds = " ".join(f"{key} {median.get(key, 0.0):.2f}" for key in ("step", *PHASES))
        memory = " ".join(f"{key} {value / 1e9:.1f}" for key, value in case["memory_bytes"].items())
        line = f"{name:<10} {seconds} s of {case['counted']}; start {case['start_s']:.0f} s; {memory} GB"
        line += f"; {median['response_tokens']:.0f} response tokens"
        if "logprob_gap_mean_nats" in median:
            line += f"; {median['logprob_gap_mean_nats']:.4f} nats between engine and trainer"
        if ours:
            line += f"; {median['step'] / ours['median']['step']:.2f} times rlframe's step, "
            line += f"{median['response_tokens'] / ours['median']['response_tokens']:.4f} times its tokens"
        lines.append(line)
    return "\n".join(lines)


FREE_S, FREE_MIB = 60.0, 2000.0
PHASES = ("rollout", "train", "weight_sync")
TRL_PHASES = {"generation": "rollout", "train": "train", "weight_sync": "weight_sync"}
"""Phases by the worker's name. What brings the weights to vLLM lies within its generation."""
VERL_PHASES = {
    "rollout": "gen",
    "reward": "reward",
    "logprobs": "old_log_prob",
    "advantages": "adv",
    "train": "update_actor",
    "weight_sync": "update_weights",
}
"""verl's name of each phase, in the order in which they follow each other."""
SIDES = {"rlframe": rlframe, "trl": trl, "verl": verl, "verl_async": verl_async}


if __name__ == "__main__":
    main()
