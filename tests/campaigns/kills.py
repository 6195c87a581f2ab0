"""Kills processes of the main job at random moments, asynchronously and in turns: nothing may be lost or doubled.

Each run is the main job with real processes, of which each kind is killed once, in a random order, a random time
after a step. In every second run all engines are killed at once; the asynchronous one of these holds the published
weights and has an engine that only evaluates. A driver that is killed is started again with the same command. After
each kill and at the end the ledger is audited; at the end every prompt was trained on once, each step was done once,
and no token was older than the lag. A run in turns must also end with the weights of the run that nobody disturbed,
bit for bit, unless a reward died with its worker.

Prints a table of what was killed, when, what the run said of it, the seconds that it cost and the verdict of the audit.
Ends with status 1 if something is wrong.
"""

import argparse
import io
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlframe.cluster.watch.marks import Page
from rlframe.loops.saving.manifest import named_checkpoints
from rlframe.tools.audit import main as audit
from tests.campaigns.trials import RESULTS, Outcome, Trial, write
from tests.multiprocess.program import ONLINE, Program, assert_equal_models, lines, titled

STEPS = 16
PROMPTS = int(ONLINE["prompts_per_step"])
COMMON = ONLINE | {
    "steps": STEPS,
    "train.offload_optimizer": False,
    "rollout.num_engines": 2,
    "rollout.max_tokens": 40,
    "rollout.min_tokens": 30,
    "rollout.max_restarts": 10,
    "cluster.max_restarts": 10,
    "evaluation.every_steps": 3,
}
"""Responses take longer than a step, so that each death meets some in the middle."""
MODES: dict[str, dict[str, Any]] = {
    "asynchronous": COMMON
    | {
        "cluster.colocate": False,
        "loop.max_policy_lag": 1,
        "algorithm.correction.bypass": True,
        "evaluation.share": 0.5,
    },
    "in turns": COMMON,
}
"""Settings of the runs by name."""
ENGINES = "all engines"
TITLES = {
    "engine": "ray::RolloutWorker",
    ENGINES: "ray::RolloutWorker",
    "runner": "ray::RunnerWorker",
    "trainer rank": "ray::MegatronWorker",
}
REWARD_WORKER = "rlframe.processes.worker"
SECOND: dict[str, dict[str, Any]] = {
    "asynchronous": {
        "weight_sync.hold": "host",
        "rollout.num_engines": 3,
        "evaluation.num_engines": 1,
        "evaluation.share": None,
    }
}
"""Other settings of every second run, by mode; None removes one."""
VICTIMS: tuple[str, ...] = ("engine", "runner", "trainer rank", "reward worker", "driver")
ROUNDS = 2
PATIENCE_S = 300.0
SAID = re.compile(
    r"restarting engine \d+|restarting the runner of attempts|restarted the trainer's ranks from"
    r"|reward\.parts\.\S+ failed on prompt"
)
"""The part of a line in which a run says what it does about a death."""
HEAD = re.compile(r"^\S+ \S+ [A-Z]+ \S+: ")
"""Time, level and name of a message."""


@dataclass(kw_only=True)
class Kill:
    """One kill and what came of it."""

    victim: str
    moment: str
    said: str = "nothing"
    seconds: float = 0.0
    """Until what died was replaced and another step was done."""
    steps: int = 0
    """Number of steps done until then."""
    wrong: list[str] = field(default_factory=list)


class Run:
    """One run of the main job, which may take several programs."""

    def __init__(self, folder: Path, settings: dict[str, Any], chance: random.Random):
        self.output, self._settings, self._chance = folder, settings, chance
        self.kills: list[Kill] = []
        self._program: Program | None = None

    def disturbed(self, victims: list[str]) -> list[Kill]:
        """Runs to the end and returns what came of each kill.

        Args:
            victims: what is killed, in order, at most one after each second step.
        """
        assert 2 * len(victims) < STEPS
        try:
            for number, victim in enumerate(victims):
                self.kills.append(kill := self._kill(victim, after=2 * number + 1))
                if said := audited(self.output):
                    kill.wrong.append(f"audit after the kill: {said}")
            code = self._started().finish(PATIENCE_S)
            wrong = [] if code == 0 else [f"ended with {code}: {self._started().errors()[-600:]}"]
        except (AssertionError, psutil.Error, subprocess.TimeoutExpired) as error:
            wrong = [f"{error!r}"[-900:]]
        finally:
            if self._program:
                self._program.__exit__()
        if said := audited(self.output):
            wrong.append(f"audit: {said}")
        for kill in self.kills:
            kill.wrong += wrong or faults(self.output)
        return self.kills

    def _started(self) -> Program:
        if self._program is None:
            self._program = Program(self.output, self._settings, fresh=True)
        return self._program

    def _kill(self, victim: str, *, after: int) -> Kill:
        """Kills a process some time after a step, and waits until the run has done a further one."""
        program = self._started()
        program.wait_for_step(after)
        later_s = self._chance.uniform(0.0, 1.2)
        time.sleep(later_s)
        kill = Kill(victim=victim, moment=f"step {done(self.output) + 1}, in {phase(self.output)}")
        before, since, killed = done(self.output), len(program.errors()), time.monotonic()
        if victim == "driver":
            program.process.send_signal(signal.SIGKILL)
            program.process.wait(PATIENCE_S)
            for left in program.survivors(PATIENCE_S / 5):
                kill.wrong.append(f"process {left.pid} outlives the driver")
            if said := audited(self.output):
                kill.wrong.append(f"audit of what the driver left: {said}")
            program.__exit__()
            self._program, since = None, 0
            kill.said = f"started again after {newest_checkpoint(self.output)}"
            num_messages = 0
        else:
            found = self._processes(program, victim)
            chosen = found if victim == ENGINES else [self._chance.choice(found)]
            for each in chosen:
                each.send_signal(signal.SIGKILL)
            num_messages = 0 if victim == "reward worker" else len(chosen)
        program = self._started()

        def noticed() -> bool:
            return len(list(said_in(program.errors()[since:]))) >= num_messages or done(self.output) == STEPS

        program.wait_for(noticed, patience_s=PATIENCE_S, every_s=0.02)
        at = max(done(self.output), before)
        program.wait_for(lambda: done(self.output) > at or at == STEPS, patience_s=PATIENCE_S, every_s=0.02)
        kill.seconds, kill.steps = time.monotonic() - killed, done(self.output) - before
        said = "; ".join(dict.fromkeys(said_in(program.errors()[since:])))
        kill.said = said.replace(f"{self.output}/", "") or kill.said
        return kill

    def _processes(self, program: Program, victim: str) -> list[psutil.Process]:
        """Returns the processes of a kind, of which there must be some in a moment."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [each for each in program.started() if is_victim(each, victim)]
            return bool(found)

        program.wait_for(look, every_s=0.05)
        return sorted(found, key=lambda each: each.pid)


def is_victim(process: psutil.Process, victim: str) -> bool:
    """Returns whether a process is of a kind."""
    if title := TITLES.get(victim):
        return titled(process, title)
    try:
        return REWARD_WORKER in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def trained(output: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics of the training steps."""
    return [line for line in lines(output / "metrics.jsonl") if "train/loss" in line]


def done(output: Path) -> int:
    """Returns the newest step in the metrics."""
    return max((line["step"] for line in trained(output)), default=0)


def newest_checkpoint(output: Path) -> str:
    """Returns the name of the newest complete checkpoint."""
    return max((folder.name for folder in named_checkpoints(output / "checkpoints")), default="none")


def usual_s(output: Path) -> float:
    """Returns the seconds of a usual step."""
    return statistics.median([line["time/step_s"] for line in trained(output)] or [0.0])


def phase(output: Path) -> str:
    """Returns what the driver was doing last."""
    page = Page(output / "logs/driver.mark")
    text = page.read().text
    page.close()
    return text


def said_in(errors: str) -> Iterator[str]:
    """Yields the sentences about deaths."""
    for line in errors.splitlines():
        if SAID.search(line):
            yield HEAD.sub("", line)[:160]


def audited(output: Path) -> str:
    """Returns what the audit finds wrong; nothing if all is well."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as wrong:
        status = audit([str(output)])
    return wrong.getvalue().strip() or f"status {status}" if status else ""


def faults(output: Path) -> list[str]:
    """Returns what is wrong with a run that has ended, beyond what the audit looks for."""
    wrong = []
    ended = [line for line in lines(output / "ledger.jsonl") if line["event"] in ("trained", "dropped")]
    if sorted(line["lease"] for line in ended if line["event"] == "trained") != list(range(STEPS * PROMPTS)):
        wrong.append("not every lease was trained on once")
    if [line["step"] for line in trained(output)] != list(range(1, STEPS + 1)):
        wrong.append(f"steps {[line['step'] for line in trained(output)]}")
    lag = max((line.get("rollout/lag_max", 0) for line in trained(output)), default=0)
    if lag > 1:
        wrong.append(f"a token was trained on {lag:g} versions later")
    evaluated = [line for line in lines(output / "metrics.jsonl") if "evaluation/reward_mean" in line]
    due = sorted({*range(0, STEPS + 1, 3), STEPS})
    if [line["step"] for line in evaluated] != due:
        wrong.append(f"evaluations of steps {[line['step'] for line in evaluated]}, not {due}")
    if any(line.get("evaluation/policy_version", line["step"]) != line["step"] for line in evaluated):
        wrong.append("an evaluation had weights of another step")
    return wrong


def rewards_failed(output: Path) -> bool:
    """Returns whether a reward was lost with its worker. It counts as 0, and the run goes another way."""
    return any(line["reward/failed_fraction"] for line in trained(output))


def campaign(
    folder: Path, *, seed: int, rounds: int = ROUNDS, modes: tuple[str, ...] = tuple(MODES)
) -> Iterator[Trial]:
    """Yields a trial for each kill, run by run."""
    chance = random.Random(seed)
    for mode in modes:
        whole: Path | None = None
        for number in range(rounds):
            settings = MODES[mode] | (SECOND.get(mode, {}) if number % 2 else {})
            settings = {key: value for key, value in settings.items() if value is not None}
            run = Run(folder / f"{mode.replace(' ', '-')}-{number}", settings, chance)
            victims = chance.sample(VICTIMS, len(VICTIMS))
            if number % 2:
                victims[victims.index("engine")] = ENGINES
            kills = run.disturbed(victims)
            usual = usual_s(run.output)
            if mode == "in turns" and not rewards_failed(run.output) and not any(kill.wrong for kill in kills):
                whole = whole or undisturbed(folder / "whole", mode)
                try:
                    assert_equal_models(run.output, whole)
                except AssertionError:
                    kills[-1].wrong.append("the model is not that of the undisturbed run")
            for kill in kills:
                yield trial_of(f"{mode} {number}", kill, usual)


def undisturbed(folder: Path, mode: str) -> Path:
    """Returns the output of a run that nobody disturbs."""
    with Program(folder, MODES[mode], fresh=True) as program:
        assert program.finish(PATIENCE_S) == 0, program.errors()
    return folder


def trial_of(run: str, kill: Kill, usual: float) -> Trial:
    """Returns a row of the table.

    Args:
        usual: seconds of a usual step of the run, which those that were done meanwhile are not counted as lost.
    """
    verdict = "; ".join(kill.wrong) or "audit passed"
    return Trial(
        name=f"{run}: {kill.victim}, {kill.moment}",
        outcome=Outcome.WRONG if kill.wrong else Outcome.SURVIVED,
        said=f"{kill.said}; {verdict}",
        seconds=round(max(kill.seconds - kill.steps * usual, 0.0), 2),
    )


def main(arguments: list[str] | None = None) -> int:
    """Tries all kills, and writes the table after each run. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table")
    chosen = parser.parse_args(arguments)
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        for trial in campaign(Path(folder), seed=chosen.seed):
            found.append(trial)
            command = f"python -m tests.campaigns.kills --seed {chosen.seed}"
            summary = write("kills", found, command=command, folder=chosen.results)
            print(f"| {trial.name} | {trial.said} | {trial.seconds} | {trial.outcome} |")  # noqa: T201
    print(summary.row())  # noqa: T201
    return int(any(trial.outcome is Outcome.WRONG for trial in found))


if __name__ == "__main__":
    sys.exit(main())
