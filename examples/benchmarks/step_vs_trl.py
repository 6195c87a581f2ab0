"""Seconds of one GRPO step: rlframe against TRL's GRPOTrainer on the same model, prompts, sizes and machine, CPU only.

Run it under rlframe's Python and give it TRL's, an environment of its own:

    python -m venv trl && trl/bin/pip install torch trl transformers accelerate datasets
    python examples/benchmarks/step_vs_trl.py --trl-python trl/bin/python [key=value ...]

`key=value` are overrides of rlframe's configuration `grpo_qwen3_moe`. Both sides stay alive and step in turns
(A B A B ...), so that what else the machine does hits both alike; the first step of each is reported as cold and left
out of the medians. Responses have a forced length, so both sides sample the same number of tokens.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.models.random_init import random_tensor
from rlframe.run.compose.online import online
from rlframe.run.compose.parts import Parts
from rlframe.run.forks import forks
from rlframe.run.load import load
from rlframe.utils.process import garbage
from rlframe.utils.registry import find

HERE = Path(__file__).resolve().parent
LR = 1e-3
Seconds = dict[str, float]
"""By phase; `step` is the whole."""


class TrlSide:
    """A TRL trainer in a process of its own, one step at a time."""

    def __init__(
        self,
        python: str,
        options: dict[str, Any],
        folder: Path,
        stack: ExitStack,
        *,
        environment: dict[str, str],
        limit_s: float | None = None,
    ):
        command = [python, HERE / "trl_worker.py"]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context((folder / "trl.log").open("w")),
            text=True,
            env=os.environ | environment,
        )
        stack.callback(self.process.kill)
        if limit_s:
            clock = threading.Timer(limit_s, self.process.kill)
            stack.callback(clock.cancel)
            clock.start()
        self.log = folder / "trl.log"
        self.about = self._answer()

    def step(self) -> Seconds:
        """One step, and how long it and its phases took."""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the TRL worker ended:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)


class RlframeSide:
    """The loop that `python -m rlframe.main` runs, one step at a time."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, stack: ExitStack):
        overrides = {
            "output": folder / "rlframe",
            "steps": arguments.pairs + 1,
            "prompts_per_step": arguments.prompts_per_step,
            "algorithm.group_size": arguments.group_size,
            "model.path": folder / "model",
            "data.path": folder / "prompts.jsonl",
            "data.evaluation_count": 0,
            "data.shuffle": "false",
            "reward.parts.exact_match.name": f"{HERE / 'even_characters.py'}:score",
            "rollout.max_tokens": arguments.response_tokens,
            "rollout.min_tokens": arguments.response_tokens,
            "train.optimizer.lr": LR,
            "logging.tensorboard": "false",
            "logging.report": "false",
            "logging.progress": "false",
        }
        given = [f"{key}={value}" for key, value in overrides.items()]
        config = load("grpo_qwen3_moe", [*given, *arguments.overrides])
        component, _ = find("rlframe.algorithms", config.algorithm.name, key="algorithm.name")
        algorithm = component(config.algorithm)
        Path(config.output).mkdir()
        # As a run starts its processes, and looks after its garbage.
        forks(config, stack)
        self.loop = online(Parts(config, algorithm.requirements, stack), algorithm)
        garbage.release()
        self.done = 0
        self.about = {"parallel": config.train.parallel, "num_engines": config.rollout.num_engines}

    def step(self) -> Seconds:
        """One step, and how long it and its phases took."""
        before = dict(self.loop.phase.totals)
        self.done += 1
        begin = time.perf_counter()
        self.loop.step(self.done)
        total = time.perf_counter() - begin
        phases = {name: value - before.get(name, 0.0) for name, value in self.loop.phase.totals.items()}
        return {"step": total, **phases}


def trl_options(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What TRL's worker is told."""
    return {
        "model": folder / "model",
        "prompts": folder / "prompts.jsonl",
        "prompts-per-step": arguments.prompts_per_step,
        "group-size": arguments.group_size,
        "response-tokens": arguments.response_tokens,
        "threads": arguments.trl_threads,
        "lr": LR,
        "steps": arguments.pairs + 1,
        "output": folder / "trl",
    }


def make_inputs(arguments: argparse.Namespace, folder: Path) -> None:
    """Fill `folder` with what both sides read: a random model in float32, and prompts for every step."""
    source = resolve(ModelConfig(path=arguments.model))
    family = load_family(source)
    architecture = family.architecture(read_config(source))
    shapes, centered = family.tensors(architecture), architecture.zero_centered_norms
    draw = partial(random_tensor, zero_centered_norms=centered, seed=0)
    copy_sidecars(source, folder / "model", dtype=torch.float32)
    write_checkpoint(folder / "model", ((name, draw(name, shape)) for name, shape in shapes.items()))
    lines = []
    generator = random.Random(0)
    for _ in range(arguments.prompts_per_step * (arguments.pairs + 1)):
        first, second = generator.randrange(10**6), generator.randrange(10**6)
        lines.append(json.dumps({"prompt": f"{first}+{second}=", "answer": str(first + second)}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="python of an environment with trl")
    parser.add_argument("--trl-threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads of TRL")
    parser.add_argument("--model", default="qwen3_moe_tiny", help="embedded model or folder whose shape both use")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=7, help="measured steps of each side")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    parser.add_argument("overrides", nargs="*", help="key=value for rlframe's configuration")
    return parser.parse_args()


def hardware() -> dict[str, Any]:
    """What the numbers were measured on."""
    named = [line.split(":") for line in cpu_lines() if ":" in line]
    models, families, numbers = (
        sorted({value.strip() for name, value, *_ in named if name.strip() == wanted})
        for wanted in ("model name", "cpu family", "model")
    )
    return {
        "cpu": models or [platform.processor()],
        # The name of a lent processor may say nothing of its generation.
        "cpu_family": families,
        "cpu_model": numbers,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
    }


def cpu_lines() -> Iterator[str]:
    """/proc/cpuinfo, where there is one."""
    path = Path("/proc/cpuinfo")
    yield from path.read_text().splitlines() if path.exists() else ()


def phases(step: dict[str, Any]) -> list[str]:
    """The names of a step's phases: what it says in seconds."""
    return [name for name, value in step.items() if isinstance(value, float)]


def summary(steps: list[Seconds]) -> dict[str, Seconds]:
    """Median and minimum of each phase over the measured steps, and the cold one."""
    cold, *warm = steps
    return {
        "cold": cold,
        "median": {phase: statistics.median(each[phase] for each in warm) for phase in phases(warm[0])},
        "min": {phase: min(each[phase] for each in warm) for phase in phases(warm[0])},
    }


def main() -> None:
    """Measure, print, write the JSON."""
    arguments = read_arguments()
    report: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "sizes": {key: getattr(arguments, key) for key in ("prompts_per_step", "group_size", "response_tokens")},
        "overrides": arguments.overrides,
        "hardware": hardware(),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_inputs(arguments, folder)
        environment = {"OMP_NUM_THREADS": str(arguments.trl_threads), "CUDA_VISIBLE_DEVICES": ""}
        options = trl_options(arguments, folder)
        rlframe = RlframeSide(arguments, folder, stack)
        trl = TrlSide(arguments.trl_python, options, folder, stack, environment=environment)
        pairs = [(rlframe.step(), trl.step()) for _ in range(arguments.pairs + 1)]
    ours, theirs = (summary([pair[side] for pair in pairs]) for side in (0, 1))
    ratio = theirs["median"]["step"] / ours["median"]["step"]
    packages = ("rlframe", "torch", "transformers", "megatron-core", "ray")
    report["rlframe"] = {**rlframe.about, "versions": {name: version(name) for name in packages}, **ours}
    report["trl"] = {**trl.about, "threads": arguments.trl_threads, **theirs}
    report["trl_over_rlframe"] = ratio
    for name, side in (("rlframe", ours), ("TRL", theirs)):
        print(f"{name}: median step {side['median']['step']:.3f} s, min {side['min']['step']:.3f} s")
        for phase, value in side["median"].items():
            print(f"    {phase:<24} {value:8.3f} s")
    print(f"TRL takes {ratio:.2f} times as long as rlframe")
    arguments.results.mkdir(parents=True, exist_ok=True)
    sizes = "x".join(str(size) for size in report["sizes"].values())
    file = arguments.results / f"step_vs_trl_{sizes}.json"
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
