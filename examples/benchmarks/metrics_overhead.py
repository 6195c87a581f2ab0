"""What metrics, alerts, kept attempts, timeline, TensorBoard and report.html cost a step, all together.

    python examples/benchmarks/metrics_overhead.py [--pairs 40] [--block 5] [key=value ...]

Runs the main job (embedded model, CPU), or the recipe of `--config-name`, in this program, in turns of blocks of steps:
in some everything is on, as by default, in the others what only tells people is left out. Training is the same in both.
Of each block it measures seconds by the clock and CPU seconds of the driver and of its processes, and compares
neighbours, so that other programs on the machine disturb both alike; which of two comes first alternates, so that a
drift cancels. CPU seconds inside the functions themselves, and of the threads that do nothing else (page, TensorBoard,
compression), are measured too, which others disturb least. Prints JSON and writes `results/metrics_overhead.json`.

On a GPU, with 512 attempts of 128 tokens from vLLM and a model that needs no download:

    python examples/benchmarks/metrics_overhead.py --pairs 6 --output gpu.json rollout=vllm train=cuda cluster=cuda \\
        rollout.num_engines=1 rollout.compile=false rollout.kv_cache_gb=4 rollout.sleep_level=0 \\
        rollout.max_num_seqs=512 rollout.max_model_len=256 data.max_prompt_tokens=64 \\
        rollout.max_tokens=128 rollout.min_tokens=128
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rlframe.loops.callbacks import Callback
from rlframe.loops.online import OnlineLoop
from rlframe.loops.reporting.advantage_stats import AdvantageStats
from rlframe.loops.reporting.metrics import MetricsLog, Seen, Tokens
from rlframe.loops.reporting.samples import Chosen
from rlframe.megatron.driver import policy
from rlframe.run.library import run
from rlframe.run.load import load

RESULT = Path(__file__).parent / "results/metrics_overhead.json"
WARM_UP_BLOCKS = 3
TELLING_THREADS = ("samples", "uploads to")
"""Beginnings of the names of threads that only tell. TensorBoard's has none of its own."""
TELLS = (True, False, False, True)
"""Whether each of four blocks in a row tells."""
Seconds = dict[str, float]


class Blocks(Callback):
    """Measures blocks of steps, of which half tell nothing."""

    def __init__(self, block: int):
        self.block, self.on = block, True
        self.inside_s = 0.0
        """CPU seconds inside the functions that tell, so far."""
        self.found: list[tuple[bool, Seconds]] = []
        """Whether a block told, and its seconds a step."""
        self._last: Seconds | None = None

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Callback."""
        if step % self.block:
            return
        now = {"clock": time.monotonic(), **cpu_s(), "inside": self.inside_s, "threads": threads_s()}
        if self._last:
            self.found.append((self.on, {name: (now[name] - self._last[name]) / self.block for name in now}))
        self._last, self.on = now, TELLS[step // self.block % len(TELLS)]

    def switch(self, owner: Any, name: str, off: Callable[..., Any]) -> None:
        """Lets a method or function that tells do `off` instead in the blocks that tell nothing, and measures it in the
        others."""
        original = vars(owner)[name]
        of_class = isinstance(original, classmethod)
        original = original.__func__ if of_class else original

        def call(*arguments: Any, **named: Any) -> Any:
            if not self.on:
                return off(*arguments, **named)
            began = time.thread_time()
            try:
                return original(*arguments, **named)
            finally:
                self.inside_s += time.thread_time() - began

        setattr(owner, name, classmethod(call) if of_class else call)


def cpu_s() -> Seconds:
    """Returns the CPU seconds of this process and of those that it has started and that live."""
    children = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        children += times.user + times.system
    driver = time.process_time()
    return {"driver_cpu": driver, "processes_cpu": children, "all_cpu": driver + children}


def threads_s() -> float:
    """Returns the CPU seconds of the threads that do nothing but tell."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(each.ident))
        for each in threading.enumerate()
        if each.ident and (each.name.startswith(TELLING_THREADS) or type(each).__name__ == "_AsyncWriterThread")
    )


def times_only(loop: OnlineLoop, *_: Any) -> dict[str, float]:
    """Stands for OnlineLoop.describe: the phases begin again, and nothing is counted."""
    return loop.phase.step_times({})


def nothing_seen(_: type[Seen], groups: Any, batch: Any) -> Seen:
    """Stands for Seen.of."""
    nothing = np.zeros(0, dtype=np.int64)
    return Seen(metrics={}, tokens=Tokens(lengths=nothing, sampled=nothing, ids=nothing), predicted=0)


def nothing_kept(_: MetricsLog, step: int, rollouts: Any, batch: Any = None, *, evaluation: str = "") -> Chosen:
    """Stands for MetricsLog.choose_samples."""
    return Chosen(step=step, rollouts=rollouts, places={}, batch=batch, evaluation=evaluation)


def compared(found: list[tuple[bool, Seconds]]) -> dict[str, Any]:
    """Returns seconds of a step with and without, and the difference of neighbours."""
    pairs = [(one, other) for (on, one), (_, other) in zip(found[::2], found[1::2], strict=False) if on]
    pairs += [(other, one) for (on, one), (_, other) in zip(found[::2], found[1::2], strict=False) if not on]
    answer: dict[str, Any] = {}
    for name in ("clock", "driver_cpu", "processes_cpu", "all_cpu"):
        extra = [one[name] - other[name] for one, other in pairs]
        without = statistics.median(other[name] for _, other in pairs)
        answer[name] = {
            "without_s": without,
            "extra_s": statistics.median(extra),
            "extra_standard_error_s": standard_error(extra),
            "extra_fraction": statistics.median(extra) / without,
        }
    cpu = statistics.median(one["all_cpu"] for one, _ in pairs)
    for name, of in (("inside", statistics.median), ("threads", statistics.mean)):
        # The mean of threads: a page is rare, and takes long.
        own = of([one[name] for one, _ in pairs])
        answer[name] = {"cpu_s": own, "fraction_of_cpu": own / cpu}
    return answer | {"pairs": len(pairs)}


def standard_error(values: list[float]) -> float:
    """Returns the standard error of the median, from the median distance to it, as of a normal distribution: a block
    that something else has disturbed counts as one."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * spread / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of blocks (default %(default)s)")
    parser.add_argument("--block", type=int, default=5, help="steps of a block (default %(default)s)")
    parser.add_argument("--config-name", default="grpo_qwen3_moe", help="recipe to run (default %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="file of the answer (default %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    blocks = Blocks(options.block)
    blocks.switch(OnlineLoop, "describe", times_only)
    blocks.switch(MetricsLog, "log", lambda log, step, metrics: log.callbacks.on_step(step, metrics))
    blocks.switch(MetricsLog, "log_samples", lambda *_: None)
    blocks.switch(MetricsLog, "choose_samples", nothing_kept)
    blocks.switch(Seen, "of", nothing_seen)
    blocks.switch(AdvantageStats, "of", lambda *_: {})
    # Only called for rollouts that are kept.
    blocks.switch(policy, "kept_logprobs", policy.kept_logprobs)
    # The first block of all is not measured: it has no beginning.
    steps = options.block * (2 * options.pairs + WARM_UP_BLOCKS + 1)
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"steps={steps}", "evaluation.every_steps=0", "checkpoint.every_steps=0", "logging.progress=false"]
        run(load(options.config_name, [*settings, f"output={folder}/run", *options.overrides]), callbacks=[blocks])
    asked = {"block_steps": options.block, "config_name": options.config_name, "overrides": options.overrides}
    answer = compared(blocks.found[WARM_UP_BLOCKS:]) | asked
    options.output.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
