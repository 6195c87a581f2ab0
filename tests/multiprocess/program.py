"""`python -m rlframe.main` as a process of its own: small settings, moments to wait for, killing, what it wrote."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from rlframe.cluster.reaper import lives
from rlframe.cluster.watch.marks import Page
from tests.multiprocess.forks import Fork
from tests.multiprocess.held import FOLDER
from tests.until import PATIENCE_S

ROOT = Path(__file__).parents[2]
REWARD = ROOT / "examples/benchmarks/even_characters.py"
DEADLINE_S = 300.0
"""Nothing here takes longer; a test that waits this long has failed."""
QUICK = {
    "model.random_init": "true",
    "prompts_per_step": 4,
    "rollout.max_tokens": 6,
    "data.max_prompt_tokens": 64,
    "data.evaluation_count": 8,
    "evaluation.every_steps": 0,
    "logging.progress": "false",
    "logging.tensorboard": "false",
}
"""The main job cut down to fractions of a second a step."""
LEARNING = QUICK | {
    "algorithm.group_size": 4,
    "reward.parts.exact_match.name": f"{REWARD}:score",
    "logging.samples_per_step": 1000,
}
"""With a reward that random answers earn, so that gradients are not zero, and every rollout written down."""
ONLINE = LEARNING | {
    "steps": 6,
    "checkpoint.every_steps": 2,
    "train.num_minibatches": 2,
    "train.offload_optimizer": True,
    "train.optimizer.lr": 3e-3,
    "train.optimizer.schedule": "cosine",
    "train.optimizer.warmup_steps": 3,
    "train.optimizer.decay_steps": 12,
    "algorithm.kl_coefficient": 0.05,
    "algorithm.adaptive_kl.target_nats": 0.01,
    "data.path": "arithmetic#20",
}
"""The run that tests look at from all sides. Adam's moments, the place in the schedule, the frozen reference, the KL
coefficient and the data cursor all change what comes next in it: two optimizer steps a batch under a cosine, KL in the
loss with a target, and an epoch of 20 prompts that ends after step 5 of 6. Between batches the optimizer sleeps."""


class Program:
    """One run, in its own process group. Leaving the `with` block ends what is left of it."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        config: str = "grpo_qwen3_moe",
        environment: dict[str, str] | None = None,
        fresh: bool = False,
        held: Sequence[str] = (),
    ):
        """Start it. `folder` becomes the run's output; the process works in its parent.

        Args:
            held: moments at which it waits for `go_on`; see `tests.multiprocess.held`. Steps only, if it is fresh.
            fresh: whether it and all its processes are started as a user's are, instead of forked (see `forks`).
        """
        self.folder = folder
        overrides = [f"{key}={value}" for key, value in settings.items()]
        module, arguments = "rlframe.main", ["--config-name", config, f"output={folder}", *overrides]
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._errors = (folder.parent / f"{folder.name}.stderr").open("w+")
        variables = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self._held = folder.parent / f"{folder.name}.held"
        if held:
            assert not fresh or all(moment.startswith("step ") for moment in held), "fresh ranks know nothing of tests"
            # A run in this folder that was killed at a moment would hold this one there.
            shutil.rmtree(self._held, ignore_errors=True)
            self._held.mkdir()
            variables[FOLDER] = str(self._held)
        for moment in held:
            (self._held / moment).touch()
        self.process: subprocess.Popen[bytes] | Fork
        if fresh or torch.cuda.is_available():
            by = ["-m", "tests.multiprocess.held"] if held else ["-m"]
            self.process = subprocess.Popen(
                [sys.executable, *by, module, *arguments],
                cwd=folder.parent,
                env=variables,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        else:
            self.process = Fork(
                module, arguments, folder=folder.parent, environment=variables, errors=self._errors.fileno()
            )
        self.children: list[psutil.Process] = []
        """Every process it had started when `wait_for` was last called: Ray's own, actors, reward workers."""

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._errors.close()

    def wait_for(self, moment: Callable[[], bool], *, patience_s: float = DEADLINE_S, every_s: float = 0.002) -> None:
        """Return as soon as `moment()` is true, having taken stock of `children`. A moment that lasts is asked for less
        often, which leaves the run more of the machine."""
        deadline = time.monotonic() + patience_s
        while not moment():
            assert self.process.poll() is None, f"ended with {self.process.returncode} too early:\n{self.errors()}"
            assert time.monotonic() < deadline, f"waited {patience_s} s:\n{self.errors()}"
            time.sleep(every_s)
        self.children = self.started()

    def go_on(self, moment: str) -> None:
        """Lets it go on from a moment at which it was held."""
        (self._held / moment).unlink()

    def started(self) -> list[psutil.Process]:
        """Every process under it now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_step(self, step: int) -> None:
        """Return as soon as the metrics of `step` are written."""
        self.wait_for(
            lambda: any(record["step"] >= step and "train/loss" in record for record in metrics(self.folder)),
            every_s=0.05,
        )

    def wait_for_half_a_checkpoint(self, step: int) -> None:
        """Return while the checkpoint of `step` is being written."""
        folder, name = self.folder / "checkpoints", f"step-{step:08d}"
        self.wait_for(lambda: any(folder.glob(f".partial-*-{name}/training/*")))
        assert not (folder / name).exists()

    def is_in_last_export(self) -> bool:
        """Whether it writes the model, which takes less time than to find a victim: it is then stopped meanwhile."""
        partial = self.folder / ".model.partial"
        if not partial.exists():
            return False
        self.process.send_signal(signal.SIGSTOP)
        if not partial.exists():
            self.process.send_signal(signal.SIGCONT)
        return partial.exists()

    def stop_while_it_trains(self) -> psutil.Process:
        """Stops a policy rank in the middle of a training call, and returns it."""
        driver, page = (Page(self.folder / f"logs/{name}.mark") for name in ("driver", "policy-0"))

        def trains() -> bool:
            return driver.read().text == "train" and page.read().num_calls > 0

        while True:
            self.wait_for(trains)
            rank = psutil.Process(next(each.pid for each in self.children if logs_to(each, "policy-0.log")))
            rank.send_signal(signal.SIGSTOP)
            if trains():
                return rank
            rank.send_signal(signal.SIGCONT)

    def doors(self) -> dict[tuple[str, int], IPv4Address | IPv6Address]:
        """The address that each listening socket of it is bound to, by the process's title and the port."""
        found = {}
        for process in [psutil.Process(self.process.pid), *self.started()]:
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                for socket in process.net_connections("inet"):
                    if socket.status == psutil.CONN_LISTEN:
                        found[command, socket.laddr.port] = ip_address(socket.laddr.ip)
        return found

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Returns the exit code."""
        return self.process.wait(deadline_s)

    def survivors(self, patience_s: float = PATIENCE_S) -> list[psutil.Process]:
        """Which of `children` are still alive after `patience_s` seconds at most."""
        deadline = time.monotonic() + patience_s
        left = self.children
        while (left := [child for child in left if lives(child)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def errors(self) -> str:
        """What it wrote to standard error so far."""
        self._errors.flush()
        return Path(self._errors.name).read_text(errors="replace")


def on_loopback(address: IPv4Address | IPv6Address) -> bool:
    """Whether only this machine reaches it. Ray's are of IPv6, on the IPv4 address as it is written there."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def titled(process: psutil.Process, title: str) -> bool:
    """Whether this is a Ray worker of that class; Ray puts it into the process title."""
    try:
        return " ".join(process.cmdline()).startswith(title)
    except psutil.NoSuchProcess:
        return False


def logs_to(process: psutil.Process, name: str) -> bool:
    """Whether the standard output of this process is the log of that name."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/{name}")
    except OSError:
        return False


def run(folder: Path, settings: dict[str, Any], **options: Any) -> Path:
    """`folder`, after a run that ended well."""
    with Program(folder, settings, **options) as program:
        assert program.finish() == 0, program.errors()
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; none when it does not exist yet."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock, or on how often ranks died."""
    return [
        {
            key: value
            for key, value in line.items()
            if not key.startswith(("time/", "throughput/", "memory/", "cluster/"))
        }
        for line in lines(folder / "metrics.jsonl")
    ]


def samples(folder: Path, step: int, *, count: int) -> list[dict[str, Any]]:
    """The first `count` samples of a step; those of an evaluation come after the ones that were trained on."""
    return [line for line in lines(folder / "samples.jsonl") if line["step"] == step][:count]


def assert_equal_models(ours: Path, theirs: Path) -> None:
    """The trained models of two runs, bit for bit."""
    left, right = (load_file(folder / "model" / "model.safetensors") for folder in (ours, theirs))
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
