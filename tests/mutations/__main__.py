"""Plants every fault of the catalogue and runs its test: `python -m tests.mutations [NAME ...] [--jobs 2]`.

Each job has a copy of the checkout. Torch is imported once; every fault is then tried in a fork, which imports the
package from its copy and runs the one test, so that a fault costs about as much as its test. The result goes to
`examples/benchmarks/results/mutations.json`; the exit code is 1 when a fault survives that has no explanation.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "examples/benchmarks/results/mutations.json"
PATIENCE_S = 300.0
"""A test that takes longer counts as one that failed: a fault may well turn into a loop without end."""
KILLED, SURVIVED, BROKEN, EXPLAINED = "killed", "survived", "broken", "survived, explained"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Holds what became of one fault."""

    name: str
    outcome: str
    seconds: float
    said: str = ""
    """The end of the test's output, for a fault that was not killed."""


def main() -> int:
    """Tries the faults that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant, by the beginning of their names; all when left out")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    from tests.mutations.catalogue import MUTATIONS  # noqa: PLC0415 - light, and only the parent needs it

    chosen = [each for each in MUTATIONS if not options.names or each.name.startswith(tuple(options.names))]
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_checkout(Path(folder) / str(job)) for job in range(options.jobs)]
        free = multiprocessing.SimpleQueue()
        for copy in copies:
            free.put(copy)
        tests = sorted({node for each in chosen for node in each.test.split()})
        with multiprocessing.get_context("fork").Pool(options.jobs, initializer=take, initargs=(free,)) as pool:
            right = dict(zip(tests, pool.imap(passes, tests), strict=True))
            if wrong := [node for node, verdict in right.items() if verdict != 0]:
                print("these fail on the right code:", *wrong, sep="\n  ")
                return 1
            verdicts = []
            for verdict in pool.imap_unordered(attempt, chosen):
                verdicts.append(verdict)
                print(f"{verdict.outcome:>20}  {verdict.seconds:6.1f} s  {verdict.name}", flush=True)
    return report(verdicts, whole=len(chosen) == len(MUTATIONS))


def warm_up() -> None:
    """Imports what every test needs and no fault changes."""
    sys.path[:0] = []
    for name in ("torch", "numpy", "pytest", "hypothesis", "transformers", "torch.distributed", "torch._dynamo"):
        __import__(name)


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


def passes(node: str) -> int:
    """Returns pytest's exit code for a test on the right code."""
    return pytest_in_a_fork([node])[0]


def attempt(mutation: "Mutation") -> Verdict:
    """Plants one fault and runs its test."""
    start = time.monotonic()
    verdict = partial(Verdict, name=mutation.name)
    file = COPY / mutation.file
    right = file.read_text(encoding="utf-8")
    if right.count(mutation.old) != 1:
        said = f"{mutation.file} has its text {right.count(mutation.old)} times"
        return verdict(outcome=BROKEN, seconds=0.0, said=said)
    try:
        file.write_text(right.replace(mutation.old, mutation.new), encoding="utf-8")
        code, said = pytest_in_a_fork(mutation.test.split())
    finally:
        file.write_text(right, encoding="utf-8")
    seconds = time.monotonic() - start
    if code == 1:
        return verdict(outcome=KILLED, seconds=seconds)
    survivor = EXPLAINED if mutation.survives and code == 0 else SURVIVED
    return verdict(outcome=survivor if code == 0 else BROKEN, seconds=seconds, said=mutation.survives or said[-600:])


def pytest_in_a_fork(nodes: list[str]) -> tuple[int, str]:
    """Returns (exit code, output) of pytest on `nodes` in a fork that works in this job's copy; 1 when it hangs."""
    with tempfile.TemporaryFile("w+b") as output:
        child = os.fork()
        if child == 0:
            run_pytest(nodes, output.fileno())
        deadline = time.monotonic() + PATIENCE_S
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(child, 9)
                os.waitpid(child, 0)
                return 1, "took too long"
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
    import pytest  # noqa: PLC0415 - imported by warm_up

    # Bytecode of the right code may be as old, to the second, as the fault.
    sys.dont_write_bytecode = True
    os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *nodes])))


def report(verdicts: Iterable[Verdict], *, whole: bool) -> int:
    """Prints the counts, writes them down after a whole run, and returns the exit code."""
    verdicts = sorted(verdicts, key=lambda verdict: verdict.name)
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    left = [verdict for verdict in verdicts if verdict.outcome != KILLED]
    for verdict in left:
        print(f"{verdict.outcome}: {verdict.name}\n    {verdict.said.strip()}")
    if whole:
        content = {
            "command": "make test-mutations",
            "planted": len(verdicts),
            "outcomes": dict(counts),
            "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
            "left": [{"name": each.name, "outcome": each.outcome, "why": each.said} for each in left],
            "killed": [verdict.name for verdict in verdicts if verdict.outcome == KILLED],
        }
        RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(verdict.outcome in (SURVIVED, BROKEN) for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
