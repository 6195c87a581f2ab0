"""What the watchdog and the marks cost: CPU seconds of a mark, marks of a step of the main job, and the watchdog's own.

Run: `python examples/benchmarks/watchdog.py [STEPS]`. Starts the main job (embedded model, CPU) for so many steps, 40
by default, counts the marks of each process between steps, and measures the rest in this process. Prints JSON.
"""

import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.activities import waiting
from rlframe.cluster.watch.marks import Page, begin_marks, end_marks, mark
from rlframe.cluster.watch.watchdog import watching

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


def trained(metrics: pathlib.Path) -> list[dict[str, float]]:
    """The records of the steps so far."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [record for line in lines if "train/loss" in (record := json.loads(line))]


def main() -> None:
    """Prints the figures."""
    num_steps = int(sys.argv[1]) if sys.argv[1:] else 40
    with tempfile.TemporaryDirectory() as folder:
        marks, step_s = main_job(num_steps, pathlib.Path(folder) / "run")
    each_s, share = mark_cpu_s(), watchdog_cpu_share()
    content = {
        "mark_us": each_s * 1e6,
        "marks_per_step": marks,
        "step_s": step_s,
        "marks_part_of_step": max(marks.values()) * each_s / step_s,
        "watchdog_part_of_a_core": share,
        "together": max(marks.values()) * each_s / step_s + share,
    }
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
