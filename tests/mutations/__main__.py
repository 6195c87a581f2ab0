"""Plants every fault of the catalogue and runs its test: `python -m tests.mutations [NAME ...] [--jobs 2]`.

Each job has a copy of the checkout. Torch is imported once; every fault is then tried in a fork, which imports the
package from its copy and runs the one test up to its first failure, so that a fault costs about as much as its test.
Each verdict goes to `examples/benchmarks/results/mutations.json` when it is known; a run of some names replaces only
their verdicts. The exit code is 1 when a fault survives that has no explanation.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "examples/benchmarks/results/mutations.json"
PATIENCE_S = 240.0
"""A test on the right code may take so long."""
TIMES_AS_LONG = 5
"""A test that takes longer than this many times what it takes on the right code, and a quarter of a minute, counts as
one that failed: a fault may well turn into a loop without end."""
WARM = """torch numpy pytest hypothesis transformers torch.distributed torch._dynamo jaxtyping beartype hydra ray
megatron.core.models.gpt megatron.core.optimizer megatron.core.dist_checkpointing"""
"""Modules that tests need and no fault changes: imported once."""
KILLED, SURVIVED, BROKEN, EXPLAINED = "killed", "survived", "broken", "survived, explained"
NOT_RUN = "not run"
"""Of a fault whose test skips itself on this machine. It is not written down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Holds what became of one fault."""

    name: str
    outcome: str
    seconds: float
    said: str = ""
    """The test that failed; for a fault that was not killed, the reason why or the end of the test's output."""


def main() -> int:
    """Tries the faults that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant, by the beginning of their names; all when left out")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [each for each in MUTATIONS if not options.names or each.name.startswith(tuple(options.names))]
    verdicts = {} if len(chosen) == len(MUTATIONS) else earlier()
    for name in WARM.split():
        __import__(name)
    with tempfile.TemporaryDirectory() as folder:
        free = multiprocessing.SimpleQueue()
        for job in range(options.jobs):
            free.put(copy_checkout(Path(folder) / str(job)))
        # Not a multiprocessing pool: its workers are daemons, whose tests could not start processes.
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(options.jobs, mp_context=fork, initializer=take, initargs=(free,)) as pool:
            tests = sorted({each.test for each in chosen})
            right = dict(zip(tests, pool.map(try_right, tests), strict=True))
            found: dict[str, Verdict] = {}
            for done in as_completed(pool.submit(attempt, each, *right[each.test]) for each in chosen):
                verdict = done.result()
                found[verdict.name] = verdict
                if verdict.outcome != NOT_RUN:
                    verdicts[verdict.name] = verdict
                print(f"{verdict.outcome:>20}  {verdict.seconds:6.1f} s  {verdict.name}", flush=True)
                write(verdicts)
    return report([found[each.name] for each in chosen])


def copy_checkout(folder: Path) -> Path:
    """Copies what git knows of the checkout, uncommitted changes included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


COPY: Path
"""The copy that belongs to this job."""


def take(free: "multiprocessing.SimpleQueue[Path]") -> None:
    """Gives this job a copy."""
    globals()["COPY"] = free.get()


def try_right(test: str) -> tuple[str, float]:
    """Returns (what is wrong with a test on the right code or "", the seconds that it took)."""
    start = time.monotonic()
    code, said = pytest_in_a_fork(test.split(), PATIENCE_S)
    if code:
        print(f"{test} fails on the right code", flush=True)
    return f"the test fails on the right code: {said[-600:]}" if code else "", time.monotonic() - start


def attempt(mutation: Mutation, wrong: str, right_s: float) -> Verdict:
    """Plants one fault and runs its test, given what `try_right` says of that test."""
    start = time.monotonic()
    verdict = partial(Verdict, name=mutation.name)
    file = COPY / mutation.file
    right = file.read_text(encoding="utf-8")
    if right.count(mutation.old) != 1:
        wrong = f"{mutation.file} has its text {right.count(mutation.old)} times"
    if wrong:
        return verdict(outcome=BROKEN, seconds=0.0, said=wrong)
    try:
        file.write_text(right.replace(mutation.old, mutation.new), encoding="utf-8")
        code, said = pytest_in_a_fork(mutation.test.split(), 15 + TIMES_AS_LONG * right_s)
    finally:
        file.write_text(right, encoding="utf-8")
    seconds = round(time.monotonic() - start, 1)
    if code == 1:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return verdict(outcome=KILLED, seconds=seconds, said=failed[1] if failed else said[-600:])
    if code == 0 and " passed" not in said:
        return verdict(outcome=NOT_RUN, seconds=seconds, said=said[-600:])
    if code == 0 and mutation.survives:
        return verdict(outcome=EXPLAINED, seconds=seconds, said=mutation.survives)
    return verdict(outcome=BROKEN if code else SURVIVED, seconds=seconds, said=said[-600:])


def pytest_in_a_fork(nodes: list[str], patience_s: float) -> tuple[int, str]:
    """Returns (exit code, output) of pytest on `nodes` in a fork that works in this job's copy; 1 when it hangs."""
    with tempfile.TemporaryFile("w+b") as output:
        child = os.fork()
        if child == 0:
            run_pytest(nodes, output.fileno())
        deadline = time.monotonic() + patience_s
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(child, 9)
                os.waitpid(child, 0)
                return 1, f"took longer than {patience_s:.0f} s"
            time.sleep(0.02)
        output.seek(0)
        return os.waitstatus_to_exitcode(done[1]), output.read().decode("utf-8", errors="replace")


def run_pytest(nodes: list[str], output: int) -> None:
    """Runs pytest in this process, which is a fork, and ends it."""
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(COPY)
    os.environ["PYTHONPATH"] = str(COPY)
    sys.path[:] = [str(COPY), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rlframe", "tests")]:
        del sys.modules[name]
    import pytest  # noqa: PLC0415 - imported before the fork
    from hypothesis import Phase, settings  # noqa: PLC0415 - imported before the fork

    # Bytecode of the right code may be as old, to the second, as the fault.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # The first example that fails is enough: the smallest one takes long to find.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("first failure", deadline=None, derandomize=True, phases=phases)
    quick = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile=first failure"]
    os._exit(int(pytest.main([*quick, *nodes])))


def earlier() -> dict[str, Verdict]:
    """Returns the verdicts that are written down, of faults that are still in the catalogue."""
    if not RESULT.exists():
        return {}
    rows = [Verdict(**row) for row in json.loads(RESULT.read_text(encoding="utf-8"))["faults"]]
    names = {mutation.name for mutation in MUTATIONS}
    return {row.name: row for row in rows if row.name in names}


def write(verdicts: dict[str, Verdict]) -> None:
    """Writes the verdicts down, in the catalogue's order."""
    rows = [verdicts[mutation.name] for mutation in MUTATIONS if mutation.name in verdicts]
    content = {
        "command": "python -m tests.mutations; a run of some faults replaces only their rows",
        "catalogue": len(MUTATIONS),
        "planted": len(rows),
        "outcomes": dict(Counter(row.outcome for row in rows)),
        "seconds": round(sum(row.seconds for row in rows), 1),
        "faults": [asdict(row) for row in rows],
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def report(verdicts: list[Verdict]) -> int:
    """Prints the counts and what was not killed; returns the exit code."""
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(each.outcome for each in verdicts).items()))
    for verdict in verdicts:
        if verdict.outcome != KILLED:
            print(f"{verdict.outcome}: {verdict.name}\n    {verdict.said.strip()}")
    return int(any(verdict.outcome in (SURVIVED, BROKEN) for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
