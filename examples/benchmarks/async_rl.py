"""Samples per second of GRPO on two GPUs: sampling and training in turns, and at the same time with a lag.

    python examples/benchmarks/async_rl.py lag0 lag1 colocated lag2 --output result.json
    python examples/benchmarks/async_rl.py mixture_lag0 mixture_lag1 --model qwen3_30b_a3b --layers 24      # four GPUs

Each case is a run of `rlframe.main` with vLLM, whose metrics.jsonl is read as it grows; the run is ended after the last
timed step. Model: Qwen3-4B's dimensions with random weights, bfloat16. Prompts have 64 tokens. Response lengths are
lognormal and the same in every case (async_rl_engine.py): a few responses are ten times as long as the mean. The cases
of a mixture of experts train on two GPUs and sample on two.

Rooflines of a step: in turns, the seconds of training and of sampling, one after the other; at the same time, the
longer of the two, both as `lag0` has measured them on one GPU each. Weight sync, rewards and packing are not in them.
Sampling alone waits for the step's longest response, which a lag of 1 spreads over two steps, so that a run with a lag
may be faster than its roofline; the seconds of training alone bound it too.

Measured (2026-11-23, two H200, vLLM 0.26.0, 256 responses a step, mean 398 tokens, 7 steps): lag0 10.8 samples/s, lag1
17.1, 1.58 times as many and 118 % of its roofline; lag2 24.2, 2.24 times; colocated 13.5, 1.25 times. Training alone
would be 43: the trainer waits for responses 60 % of the time with a lag of 1, and 44 % with 2.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models_by_size import MODELS, make_model
from weight_sync import machine

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 64
MICROBATCH_TOKENS = 8192
LONGEST = 4096
SIZES = [1, 2, 4, 8, 16, 24, *range(32, 513, 32)]
"""Batches for which decoding has a CUDA graph."""
SPLIT = {"cluster.colocate": "false", "rollout.num_engines": 1, "+rollout.gpu_memory_utilization": 0.8}
"""One GPU trains, the other one samples."""
AHEAD = {"loop.max_policy_lag": 1, "loop.in_flight_updates": "true"}
BOTH = {
    "cluster.colocate": "true",
    "train.parallel": "d2",
    "rollout.num_engines": 2,
    "+rollout.gpu_memory_utilization": 0.35,
}
"""Both GPUs train, then both sample."""
MIXTURE = SPLIT | {
    "train.parallel": "d2e2",
    "+train.recompute": "full",
    "+train.moe.router_replay": "true",
    "+train.optimizer.moment_dtype": "bfloat16",
    "rollout.num_engines": 2,
    "rollout.tp": 1,
    "+rollout.worker_process": "true",
    # A layer's launches take a micro-batch of 8,192 tokens longer than its kernels.
    "+train.max_tokens_per_microbatch": 16384,
}
"""Two GPUs train, each with half of the experts, two sample, each on its own. Routers replay the engine's choice."""
CASES: dict[str, dict[str, Any]] = {
    "lag0": SPLIT,
    "lag1": SPLIT | AHEAD,
    "lag2": SPLIT | AHEAD | {"loop.max_policy_lag": 2, "loop.pipeline_depth": 2},
    "colocated": BOTH,
    "mixture_lag0": MIXTURE,
    "mixture_lag1": MIXTURE | AHEAD,
}
PHASES = ("rollout", "train", "weight_sync", "other")


def main() -> None:
    arguments = read_arguments()
    result = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"cases": {}}
    sizes = ("model", "layers", "longest", "prompts", "group", "mean_tokens", "sigma", "warm_up", "steps")
    result |= {"machine": machine(), "sizes": {name: getattr(arguments, name) for name in sizes}}
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            result["cases"][case] = measure(case, arguments, Path(folder))
        result["ratios"] = ratios(result["cases"])
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({key: value for key, value in result["cases"][case].items() if key != "by_step"}), flush=True)
    print(table(result))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=CASES, nargs="+")
    parser.add_argument("--model", choices=MODELS, default="qwen3_4b")
    parser.add_argument("--layers", type=int, default=0, help="layers that are left of the model; 0: all")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens at which responses are cut off")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--mean-tokens", type=float, default=400.0)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    parser.add_argument("--warm-up", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=7, help="steps that are counted")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds of one case, its start included")
    parser.add_argument("--set", nargs="*", default=[], help="key=value for rlframe's configuration, in every case")
    parser.add_argument("--output", type=Path, default=HERE / "results/async_rl.json")
    parser.add_argument("--logs", type=Path, help="folder for the messages of the runs")
    return parser.parse_args()


def measure(case: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs one case. Returns its figures over the timed steps; fewer than asked for if time is short."""
    logs = arguments.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    (folder / "running").mkdir()
    begun = time.time()
    with (logs / f"{case}.log").open("w") as log:
        run = subprocess.Popen(
            command(case, arguments, folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"},
            start_new_session=True,
        )
        try:
            count = arguments.warm_up + arguments.steps
            steps = list(follow(folder / "run/metrics.jsonl", run, count=count, until=begun + arguments.limit_s))
        finally:
            stop(run)
    if len(steps) < arguments.warm_up + 2:
        raise SystemExit(f"{case}: {len(steps)} steps\n{(logs / f'{case}.log').read_text()[-6000:]}")
    engines = [read_running(file) for file in (folder / "running").glob("*.jsonl")]
    return {"start_s": steps[0]["at"] - begun} | figures(steps[arguments.warm_up - 1 :], engines)


def command(case: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the command of a case's run, and writes what it reads."""
    config = MODELS[arguments.model] | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})
    model = make_model(config, folder / "model", words=config["vocab_size"])
    graphs = f"{{mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:{SIZES}}}".replace(" ", "")
    settings = {
        "output": folder / "run",
        "steps": 1000,
        "prompts_per_step": arguments.prompts,
        "algorithm.group_size": arguments.group,
        "model.path": model,
        "model.random_init": "true",
        "data.path": write_prompts(folder / "prompts.jsonl"),
        "data.max_prompt_tokens": PROMPT_TOKENS,
        "data.evaluation_count": 0,
        "data.shuffle": "false",
        "reward.parts.exact_match.name": f"{HERE / 'even_characters.py'}:score",
        "rollout.name": f"{HERE / 'async_rl_engine.py'}:LengthsVllm",
        "rollout.max_tokens": arguments.longest,
        "+rollout.max_model_len": arguments.longest + 2 * PROMPT_TOKENS,
        "+rollout.max_num_seqs": max(SIZES),
        "+rollout.engine_options": f"{{compilation_config:{graphs}}}",
        "+rollout.mean_tokens": arguments.mean_tokens,
        "+rollout.sigma": arguments.sigma,
        "+rollout.running_log": folder / "running",
        "train.dtype": "bfloat16",
        "+train.max_tokens_per_microbatch": MICROBATCH_TOKENS,
        "+train.optimizer.precision_aware": "true",
        "train.optimizer.lr": 1e-6,
        "checkpoint.on_signal_s": 0,
        "checkpoint.every_steps": 0,
        "evaluation.every_steps": 0,
        "logging.progress": "false",
        "logging.tensorboard": "false",
    } | CASES[case]  # fmt: skip
    groups = ["rollout=vllm", "train=cuda", "cluster=cuda"]
    overrides = [*groups, *(f"{key}={value}" for key, value in settings.items()), *arguments.set]
    return [sys.executable, "-m", "rlframe.main", "--config-name", "grpo_qwen3_moe", *overrides]


def write_prompts(file: Path, count: int = 4096) -> Path:
    """Writes prompts of PROMPT_TOKENS random words, no two alike. Returns `file`."""
    generator = random.Random(0)
    texts = (" ".join(f"w{generator.randrange(3, 1000)}" for _ in range(PROMPT_TOKENS)) for _ in range(count))
    file.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    return file


def follow(
    file: Path,
    run: subprocess.Popen[bytes],
    *,
    count: int,
    until: float,
    read: Callable[[str], dict[str, float]] = json.loads,
    key: str = "time/step_s",
) -> Iterator[dict[str, float]]:
    """Yields the metrics of the first `count` steps with the time `at` which each was written, as they come. Ends early
    when the run ends or it is `until`.

    Args:
        read: makes metrics of a line.
        key: the seconds of a step. A line that lacks it is not one of a step.
    """
    done = 0
    while done < count and time.time() < until and run.poll() is None:
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        at = time.time()
        records = [each for each in map(read, lines) if key in each]
        for record in records[done:count]:
            print(f"step {record['step']} {record[key]:.2f} s", flush=True)
            yield record | {"at": at}
        done = max(done, len(records))
        time.sleep(0.02)


def stop(run: subprocess.Popen[bytes]) -> None:
    """Ends a run, of which nothing is to be saved."""
    if run.poll() is None:
        run.send_signal(signal.SIGTERM)
        try:
            run.wait(5)
        except subprocess.TimeoutExpired:
            # The second one ends it without a checkpoint.
            run.send_signal(signal.SIGTERM)
        try:
            run.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def read_running(file: Path) -> list[tuple[float, int]]:
    """Returns the times at which the number of an engine's requests changed, and the number from then on."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(line["at"], line["running"]) for line in lines]


def occupancy(changes: list[tuple[float, int]], begin: float, end: float) -> tuple[float, float]:
    """Returns the fraction of the time from `begin` to `end` without a request, and the mean number of requests."""
    idle = requests = 0.0
    for (at, running), (following, _) in zip(changes, [*changes[1:], (end, 0)], strict=True):
        seconds = max(0.0, min(following, end) - max(at, begin))
        idle += seconds * (running == 0)
        requests += seconds * running
    return idle / (end - begin), requests / (end - begin)


def figures(steps: list[dict[str, float]], engines: list[list[tuple[float, int]]]) -> dict[str, Any]:
    """Returns the figures of all but the first of `steps`, whose end begins the first timed one."""
    begin, end = steps[0]["at"], steps[-1]["at"]
    timed = steps[1:]

    def mean(key: str) -> float:
        return sum(step.get(key, 0.0) for step in timed) / len(timed)

    step_s = (end - begin) / len(timed)
    shares = [occupancy(changes, begin, end) for changes in engines]
    lengths = ("rollout/response_tokens_mean", "rollout/response_tokens_max", "rollout/lag_mean")
    gaps = ("rollout/logprob_gap_mean_nats", "rollout/logprob_gap_max_nats")
    keys = ("time/step_s", "time/policy_update_s", *(f"time/{name}_s" for name in PHASES), *lengths, *gaps)
    return {
        "timed_steps": len(timed),
        "step_s": step_s,
        "samples_per_s": mean("rollout/sampled") / step_s,
        "tokens_per_s": mean("rollout/tokens") / step_s,
        "response_tokens_mean": mean("rollout/response_tokens_mean"),
        "response_tokens_max": mean("rollout/response_tokens_max"),
        "phases_s": {name: mean(f"time/{name}_s") for name in PHASES},
        "weight_sync_pause_s": mean("time/weight_sync_pause_s"),
        "trainer_waits": mean("time/rollout_s") / step_s,
        "engine_idle": [idle for idle, _ in shares],
        "engine_requests_mean": [requests for _, requests in shares],
        "lag_mean": mean("rollout/lag_mean"),
        "logprob_gap_mean_nats": mean("rollout/logprob_gap_mean_nats"),
        "lag_max": max(step.get("rollout/lag_max", 0.0) for step in timed),
        "by_step": [{key: step.get(key) for key in keys} for step in timed],
    }


def ratios(cases: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of each roofline, how much of it each case reaches, and how much faster than lag0 it is."""
    found: dict[str, float] = {}
    for case, measured in cases.items():
        ahead = "loop.max_policy_lag" in CASES[case]
        in_turns = cases.get("mixture_lag0" if case.startswith("mixture_") else "lag0")
        parts = (in_turns if ahead and in_turns else measured)["phases_s"]
        roofline = (max if ahead else sum)((parts["rollout"], parts["train"]))
        found |= {f"{case}/roofline_s": roofline, f"{case}/of_roofline": roofline / measured["step_s"]}
        if in_turns:
            found[f"{case}/over_lag0"] = measured["samples_per_s"] / in_turns["samples_per_s"]
    return found


def table(result: dict[str, Any]) -> str:
    """Returns what was measured, a line per case."""
    lines = []
    for case, found in result["cases"].items():
        phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in found["phases_s"].items())
        idle = " ".join(f"{share:.0%}" for share in found["engine_idle"])
        roofline_s, reached = (result["ratios"][f"{case}/{name}"] for name in ("roofline_s", "of_roofline"))
        over = result["ratios"].get(f"{case}/over_lag0", math.nan)
        lines.append(
            f"{case:<10} {found['samples_per_s']:6.2f} samples/s {found['tokens_per_s']:7.0f} tokens/s "
            f"{found['step_s']:6.2f} s a step ({phases}); trainer waits {found['trainer_waits']:.0%}, "
            f"engine idle {idle}; lag {found['lag_mean']:.2f}; roofline {roofline_s:.2f} s, {reached:.0%} of it; "
            f"{over:.2f} times lag0"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
