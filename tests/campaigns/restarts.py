"""Policy ranks killed at random moments: the run must end with the numbers of the run that nobody disturbed.

Two runs, one that writes its checkpoints in the background, each with a rank killed again and again.
"""

import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.trials import Outcome, Trial, write
from tests.multiprocess.program import ONLINE, Program, assert_equal_models, lines, metrics, run, titled

MOMENTS: dict[bool, list[tuple[str, int]]] = {
    False: [("step", 0), ("step", 1), ("writing checkpoint", 2), ("step", 3), ("step", 5), ("last export", 24)],
    True: [("step", 0), ("writing checkpoint", 2), ("step", 3), ("writing checkpoint", 6), ("step", 7)],
}
"""By whether checkpoints are written in the background: after or in what a rank is killed."""
SETTINGS = ONLINE | {"steps": 24}
LATEST_S = 1.0
"""A kill after a step comes up to so much later."""


def trials(folder: Path, *, seed: int) -> Iterator[list[Trial]]:
    """Yields, run by run, a trial for each kill."""
    whole = run(folder / "whole", SETTINGS)
    chance = random.Random(seed)
    for asynchronous, moments in MOMENTS.items():
        settings = SETTINGS | {"checkpoint.asynchronous": asynchronous, "cluster.max_restarts": len(moments)}
        yield disturbed(folder / f"asynchronous-{asynchronous}", settings, moments, whole, chance)


def disturbed(
    folder: Path, settings: dict[str, Any], moments: list[tuple[str, int]], whole: Path, chance: random.Random
) -> list[Trial]:
    """Returns a trial for each of `moments` of one run, all with the outcome of the run."""
    kills: list[tuple[str, float]] = []
    with Program(folder, settings, fresh=True) as program:
        for what, step in moments:
            program.wait_for(moment(program, what, step))
            later_s = chance.uniform(0.0, LATEST_S) if what == "step" else 0.0
            time.sleep(later_s)
            kills.append((f"{what} {step} + {later_s:.2f} s", kill_one(program, len(kills), chance)))
        code = program.finish()
        said = program.errors()
    wrong = difference(program.folder, whole) if code == 0 else f"ended with {code}: {said[-500:]}"
    places = re.findall(r"died in ([\w ()]+)$", said, re.MULTILINE)
    return [
        Trial(
            name=f"checkpoint.asynchronous={settings['checkpoint.asynchronous']}, {name}",
            outcome=Outcome.WRONG if wrong else Outcome.SURVIVED,
            said=wrong or f"a rank died in {places[index] if index < len(places) else '?'}",
            seconds=seconds,
        )
        for index, (name, seconds) in enumerate(kills)
    ]


def moment(program: Program, what: str, step: int) -> Callable[[], bool]:
    """Returns what says whether the moment has come."""
    folder = program.folder / "checkpoints"
    if what == "writing checkpoint":
        return lambda: any(folder.glob(f".partial-*-step-{step:08d}/training/*"))
    if what == "last export":
        return program.is_in_last_export
    return lambda: any(record["step"] >= step for record in metrics(program.folder))


def kill_one(program: Program, before: int, chance: random.Random) -> float:
    """Kills a random policy rank, and returns the seconds until the next step is finished, or the program.

    Args:
        before: kills so far.
    """
    ranks = [each for each in program.started() if titled(each, "ray::MegatronWorker")]
    chance.choice(ranks).send_signal(signal.SIGKILL)
    program.process.send_signal(signal.SIGCONT)
    killed = time.monotonic()

    def steps() -> int:
        return sum("train/loss" in record for record in metrics(program.folder))

    def over(condition: Callable[[], bool]) -> None:
        while program.process.poll() is None and not condition():
            assert time.monotonic() < killed + 300, program.errors()
            time.sleep(0.02)

    over(lambda: program.errors().count("restarted the trainer's ranks from") > before)
    done = steps()
    over(lambda: steps() > done)
    return time.monotonic() - killed


def difference(folder: Path, whole: Path) -> str:
    """Returns how a run differs from the undisturbed one; nothing when it does not."""
    if metrics(folder) != metrics(whole):
        return "other metrics"
    if lines(folder / "samples.jsonl") != lines(whole / "samples.jsonl"):
        return "other samples"
    try:
        assert_equal_models(folder, whole)
    except AssertionError:
        return "another model"
    return ""


def main() -> None:
    """Tries all moments, and writes after each run; an argument is the seed."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        for each in trials(Path(folder), seed=seed):
            found += each
            print(write("restarts", found, command=f"python -m tests.campaigns.restarts {seed}").row())  # noqa: T201


if __name__ == "__main__":
    main()
