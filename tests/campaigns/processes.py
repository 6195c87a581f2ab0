"""Stops, slows and kills each process of the main job in each phase, and times the sentence that names it.

`stop` stops a process until the watchdog has named it and then lets it go on, `slow` stops it for less than
cluster.stall_warning_s, `hold` keeps it stopped until the run has ended of it, `last` until it has ended by itself,
`kill` kills it. Faults that a run outlives are planted one after the other in the same run.
"""

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlframe.cluster.watch.marks import Page
from tests.campaigns.trials import RESULTS, Outcome, Trial, write
from tests.multiprocess.program import LEARNING, Program, metrics

STALL_S = 3.0
LIMIT_S = 40.0
SETTINGS = LEARNING | {
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 1,
    "data.path": "arithmetic#20",
    "rollout.max_restarts": 1000,
    "cluster.max_restarts": 1000,
    "cluster.stall_warning_s": STALL_S,
    "cluster.phase_timeout_s": LIMIT_S,
    "logging.samples_per_step": 0,
}
PHASES = {
    "start": ("start of the policy",),
    "rollout": ("rollout", "generate"),
    "reward": ("reward",),
    "train": ("train",),
    "weight_sync": ("weight_sync", "weight sync"),
    "checkpoint": ("checkpoint", "writing of the checkpoint", "end of the checkpoint"),
}
"""What the driver marks in each phase."""
STEP = list(PHASES)[1:]
RANKS = {"policy 0": ("policy", 0), "policy 1": ("policy", 1), "engine 0": ("rollout", 0)}
PROGRAMS = {"raylet": "raylet", "gcs": "gcs_server", "reward worker": "rlframe.processes.worker"}
DEADLINE_S = 240.0
LAST_STEPS = 8
COMMAND = "python -m tests.campaigns.processes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Names what is done to whom, and when."""

    how: str
    victim: str
    phase: str

    def __str__(self) -> str:
        return f"{self.how} {self.victim} in {self.phase}"


class Run:
    """Holds a run that trains until it ends of a fault."""

    def __init__(self, folder: Path, number: int, *, num_steps: int):
        self.program = Program(folder / f"run-{number}", SETTINGS | {"steps": num_steps}, fresh=True)
        self.folder = self.program.folder

    def ready(self) -> None:
        """Returns once two steps are done."""
        self.program.wait_for_step(2)

    def pid(self, victim: str) -> int | None:
        """Returns the process of a victim."""
        if victim == "driver":
            return self.program.process.pid
        for process in psutil.Process(self.program.process.pid).children(recursive=True):
            try:
                log = "{}-{}.log".format(*RANKS.get(victim, ("no", 0)))
                if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/{log}"):
                    return process.pid
                command = process.cmdline()
                if victim in PROGRAMS and (process.name() == PROGRAMS[victim] or PROGRAMS[victim] in command):
                    return process.pid
            except (psutil.NoSuchProcess, OSError):
                continue
        return None

    def wait_for_phase(self, phase: str) -> None:
        """Returns as soon as the driver is seen in a phase."""
        path, deadline, text = self.folder / "logs/driver.mark", time.monotonic() + DEADLINE_S, ""
        while not text.startswith(PHASES[phase]):
            assert self.ended is None and time.monotonic() < deadline, f"never in {phase}: {self.program.errors()}"
            time.sleep(0.0005)
            if path.is_file() and path.stat().st_size:
                page = Page(path)
                text = page.read().text
                page.close()

    @property
    def num_steps(self) -> int:
        """Steps in metrics.jsonl."""
        return max((record["step"] for record in metrics(self.folder)), default=0)

    @property
    def ended(self) -> int | None:
        """The exit code of a run that has ended."""
        return self.program.process.poll()

    def goes_on(self, steps: int) -> bool:
        """Whether so many further steps come."""
        goal, deadline = self.num_steps + steps, time.monotonic() + DEADLINE_S / 2
        while self.num_steps < goal:
            if self.ended is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def named(self, victim: str, pid: int, since: int) -> str | None:
        """Returns the line of standard error after character `since` that names the victim as what is wrong."""
        for line in self.program.errors()[since:].splitlines():
            by_rank = victim in RANKS and "{} rank {} (pid {} ".format(*RANKS[victim], pid) in line
            by_program = victim in PROGRAMS and f"{PROGRAMS[victim]} (pid {pid})" in line
            if (by_rank or by_program) and ("stopped" in line or "died" in line or "dead" in line):
                return line
        return None


def plant(run: Run, fault: Fault) -> Trial:
    """Returns what a fault came to."""
    if fault.phase == "start":
        # There is nobody before.
        run.wait_for_phase(fault.phase)
    pid = run.pid(fault.victim)
    if pid is None:
        return Trial(name=str(fault), outcome=Outcome.WRONG, said="no such process")
    run.wait_for_phase(fault.phase)
    since, planted = len(run.program.errors()), time.monotonic()
    os.kill(pid, signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)
    try:
        if fault.how == "slow":
            time.sleep(STALL_S / 2)
            os.kill(pid, signal.SIGCONT)
            return outlived(run, fault)
        return watched(run, fault, pid, since, planted)
    finally:
        if fault.how != "kill" and psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def watched(run: Run, fault: Fault, pid: int, since: int, planted: float) -> Trial:
    """Returns what a fault comes to that lasts: a sentence, or a run that does without the victim."""
    steps = run.num_steps
    line, ended, first_s = None, None, 0.0
    while time.monotonic() - planted < DEADLINE_S / 2:
        seconds = time.monotonic() - planted
        if line is None and (line := run.named(fault.victim, pid, since)):
            first_s = seconds
        ended = run.ended
        if ended is not None or (line and fault.how == "stop"):
            break
        if fault.how in ("stop", "kill") and run.num_steps >= steps + 4 and seconds > 2 * STALL_S:
            named_s = None if line is None else round(first_s, 2)
            return Trial(name=str(fault), outcome=Outcome.SURVIVED, said=(line or "went on")[:300], seconds=named_s)
        time.sleep(0.1)
    line = line or run.named(fault.victim, pid, since)
    if line is None:
        tail = " / ".join(run.program.errors()[since:].strip().splitlines()[-3:])
        return Trial(name=str(fault), outcome=Outcome.WRONG, said=f"exit code {ended}: {tail}"[:400])
    if ended not in {"stop": (None,), "last": (0,)}.get(fault.how, (1,)):
        return Trial(name=str(fault), outcome=Outcome.WRONG, said=f"exit code {ended} after: {line}"[:400])
    if fault.how == "stop" and ended is None:
        os.kill(pid, signal.SIGCONT)
        if not run.goes_on(2):
            return Trial(name=str(fault), outcome=Outcome.WRONG, said=f"did not go on after: {line}"[:400])
    return Trial(name=str(fault), outcome=Outcome.REPORTED, said=line[:300], seconds=round(first_s or seconds, 2))


def outlived(run: Run, fault: Fault) -> Trial:
    """Returns whether the run goes on."""
    if run.goes_on(2):
        return Trial(name=str(fault), outcome=Outcome.SURVIVED, said="went on")
    tail = " / ".join(run.program.errors().strip().splitlines()[-3:])
    return Trial(name=str(fault), outcome=Outcome.WRONG, said=f"exit code {run.ended}: {tail}"[:400])


def faults(kinds: set[str]) -> Iterator[Fault]:
    """Yields the class, those that a run outlives first."""
    victims = ["policy 0", "policy 1", "engine 0", "reward worker", "raylet", "gcs"]
    chosen = [
        *itertools.product(["stop"], victims, STEP),
        *itertools.product(["slow"], [*victims, "driver"], ["rollout", "train", "weight_sync", "checkpoint"]),
        *itertools.product(["kill"], ["engine 0", "reward worker"], STEP),
        *itertools.product(["kill"], ["policy 0", "policy 1"], ["rollout", "train", "weight_sync", "checkpoint"]),
        *itertools.product(["hold"], ["policy 1"], ["train", "checkpoint"]),
        *itertools.product(["hold"], ["raylet"], ["train", "rollout"]),
        *itertools.product(["kill"], ["raylet", "gcs"], ["train", "rollout"]),
        ("hold", "engine 0", "rollout"),
        ("last", "gcs", "rollout"),
        *itertools.product(["stop", "kill"], ["policy 0", "policy 1", "engine 0"], ["start"]),
    ]
    yield from (Fault(how=how, victim=victim, phase=phase) for how, victim, phase in chosen if how in kinds)


def main() -> None:
    """Plants every fault, and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default="stop,slow,kill,hold,last", help="kinds, comma-separated")
    parser.add_argument("--only", default="", help="text that the name of a fault must hold")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table")
    arguments = parser.parse_args()
    trials, run = [], None
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(faults(set(arguments.faults.split(",")))):
            if arguments.only not in str(fault):
                continue
            fresh = fault.how == "last" or fault.phase == "start"
            if run is not None and fresh:
                run.program.kill()
            try:
                if run is None or run.ended is not None:
                    run = Run(Path(folder), number, num_steps=LAST_STEPS if fault.how == "last" else 100000)
                    if fault.phase != "start":
                        run.ready()
                trial = plant(run, fault)
            except AssertionError as error:
                trial = Trial(name=str(fault), outcome=Outcome.WRONG, said=str(error)[-400:])
            assert run is not None
            trials.append(trial)
            if trial.outcome is Outcome.WRONG or run.ended is not None:
                run.program.kill()
                for process in run.program.survivors(5.0):
                    process.kill()
            summary = write(
                "processes", trials, command="python -m tests.campaigns.processes", folder=arguments.results
            )
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {trial}\n{summary.row()}\n")
            sys.stdout.flush()
        if run:
            run.program.kill()


if __name__ == "__main__":
    main()
