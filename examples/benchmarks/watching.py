"""What watching costs a step of the main job: marks, the watchdog, comparisons of replicas, audits.

Run: `python examples/benchmarks/watching.py [STEPS]`. Starts the main job (embedded model, CPU) for so many steps, 40
by default, counts the marks of each process between steps, and measures the rest in this process, the proofs in a
second run. Prints JSON and writes it to `results/watching.json`.
"""

import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from rlframe.algorithms.grpo import Grpo
from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.activities import waiting
from rlframe.cluster.watch.marks import Page, begin_marks, end_marks, mark
from rlframe.cluster.watch.watchdog import watching
from rlframe.run.compose.online import online
from rlframe.run.compose.parts import Parts
from rlframe.run.load import load
from rlframe.weight_sync.border import SourceRank

RESULT = pathlib.Path(__file__).parent / "results/watching.json"
COUNT = 200_000
WATCHED_S = 30.0


def mark_cpu_s() -> float:
    """CPU seconds of one mark, the least of five rounds."""
    with tempfile.TemporaryDirectory() as folder:
        begin_marks(pathlib.Path(folder) / "x.mark")
        rounds = []
        for _ in range(5):
            begun = time.process_time()
            for number in range(COUNT // 5):
                mark(f"forward {number} of 8 micro-batches")
            rounds.append((time.process_time() - begun) / (COUNT // 5))
        end_marks()
    return min(rounds)


def watchdog_cpu_share() -> float:
    """Part of a core that the watchdog of a driver uses while it waits for four ranks of this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder, sleepers = pathlib.Path(name), [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
        for rank in range(4):
            Page(folder / f"policy-{rank}.mark", create=True)
        workers = [
            WorkerInfo(
                role="policy", rank=rank, node_id="", host=socket.gethostname(), address="", pid=sleeper.pid,
                log=str(folder / f"policy-{rank}.log"),
            )
            for rank, sleeper in enumerate(sleepers)
        ]  # fmt: skip
        with watching(ClusterConfig(), folder), waiting("train", role="policy", limit_s=600) as activity:
            activity.waits_for = workers
            begun = time.process_time()
            time.sleep(WATCHED_S)
            used = time.process_time() - begun
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait(10)
    return used / WATCHED_S


def main_job(num_steps: int, folder: pathlib.Path) -> tuple[dict[str, float], float]:
    """Marks of a step by process, and the median seconds of a step."""
    overrides = [f"steps={num_steps}", f"output={folder}", "logging.progress=false", "checkpoint.every_steps=0"]
    command = [sys.executable, "-m", "rlframe.main", "--config-name", "grpo_qwen3_moe", *overrides]
    metrics, seen = folder / "metrics.jsonl", {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.2)
            done = trained(metrics)
            if done:
                pages = {path.stem: Page(path).read().number // 2 for path in (folder / "logs").glob("*.mark")}
                seen.setdefault(done[-1]["step"], pages)
    # The last steps are followed by an evaluation and an export.
    first, last = min(seen), max(step for step in seen if step < num_steps)
    marks = {name: (seen[last][name] - number) / (last - first) for name, number in seen[first].items()}
    return marks, statistics.median(step["time/step_s"] for step in trained(metrics)[first:])


def proofs(num_steps: int, folder: pathlib.Path) -> dict[str, float]:
    """Returns the median seconds of a step and of each proof, and the part of a step that the proofs are."""
    overrides = [f"output={folder}", "logging.progress=false", "logging.tensorboard=false"]
    config = load("grpo_qwen3_moe", overrides)
    algorithm = Grpo(config.algorithm)
    steps, audits, copies, replicas = [], [], [], []
    with ExitStack() as stack:
        parts = Parts(config, algorithm.requirements, stack)
        loop = online(parts, algorithm)
        loop.rollout.audit = None  # measured apart
        for step in range(1, num_steps + 1):
            steps.append(timed(lambda: loop.step(step)))  # noqa: B023 - called at once
            audits.append(timed(loop.weight_sync.audit))
            copies.append(timed(lambda: [group.prove() for group in parts.groups]))
            connection = loop.weight_sync._connected
            held = np.stack([each.held for each in loop.policy.call(SourceRank.digests)])
            replicas.append(timed(lambda: connection.source_shares.first_drift(held)))  # noqa: B023 - called at once
    found = {
        "step_s": statistics.median(steps),
        "engine_audit_s": statistics.median(audits),
        "rank_audit_s": statistics.median(copies),
        "replicas_of_a_sync_s": statistics.median(replicas),
    }
    every = config.weight_sync.audit_every_steps, config.cluster.audit_every_steps
    spent = found["engine_audit_s"] / every[0] + found["rank_audit_s"] / every[1] + found["replicas_of_a_sync_s"]
    return found | {"proofs_part_of_step": spent / found["step_s"]}


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def trained(metrics: pathlib.Path) -> list[dict[str, float]]:
    """The records of the steps so far."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [record for line in lines if "train/loss" in (record := json.loads(line))]


def main() -> None:
    """Prints the figures."""
    num_steps = int(sys.argv[1]) if sys.argv[1:] else 40
    with tempfile.TemporaryDirectory() as folder:
        marks, step_s = main_job(num_steps, pathlib.Path(folder) / "run")
        proved = proofs(num_steps, pathlib.Path(folder) / "proofs")
    each_s, share = mark_cpu_s(), watchdog_cpu_share()
    content = {
        "mark_us": each_s * 1e6,
        "marks_per_step": marks,
        "step_s": step_s,
        "marks_part_of_step": max(marks.values()) * each_s / step_s,
        "watchdog_part_of_a_core": share,
        "proofs": proved,
        "together": max(marks.values()) * each_s / step_s + share + proved["proofs_part_of_step"],
    }
    text = json.dumps({"command": f"python examples/benchmarks/watching.py {num_steps}", **content}, indent=1) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
