"""Runs jobs on the GPUs of a lent machine, several side by side, each on GPUs of its own and within a limit of time.

    python tests/gpu/payload/jobs.py PLAN.json OUT --limit-s 570

PLAN.json is a list of phases, each a dict from the GPUs of a lane, as in CUDA_VISIBLE_DEVICES, to its jobs, which run
one after the other. The lanes of a phase run side by side. A phase begins when the one before has ended:

    [{"0,1": [{"name": "lag", "run": "python examples/benchmarks/async_rl.py lag1 --output $RESULT/lag.json",
               "limit_s": 190}],
      "2": [{"name": "tests", "run": "python -m pytest -o addopts='' tests/gpu/test_hold_cuda.py", "limit_s": 120,
             "path": ["overlay/newest", "overlay/extras"]}]}]

`run` is a command of bash in the current folder. In it $RESULT is a folder of the job's own. `path` names folders of
the home folder that go on PYTHONPATH before ~/overlay/extras and ~/site, `env` further variables. When a job ends, or
its limit does, every process that has its environment or its session is killed, so that none holds a GPU that the next
job needs: daemons have sessions of their own, and a process that has given itself a title has no environment to read.

A job may outlast the ten minutes of a call on the machine: machine.sh gives the queue a session of its own.

OUT/results.tgz has the folders and each job's messages (`log`), without links and files of more than LARGEST_BYTES,
OUT/jobs.json the exit status and the seconds of each. Both are written anew whenever a job ends, because a machine may
be taken back. No job begins with less than 20 of the
seconds of --limit-s left, and none goes on longer.
"""

import argparse
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "RLFRAME_GPU_JOB"
"""Environment variable by which the processes of a job are known."""
LEAST_S = 20.0
TAIL_CHARACTERS = 1500
LARGEST_BYTES = 16 << 20
"""A model that a job has made would hold up all lanes for as long as it takes to pack it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path, help="folder of what is to be kept")
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds of all phases")
    parser.add_argument("--folder", type=Path, default=Path.home() / "results", help="parent of the jobs' folders")
    arguments = parser.parse_args()
    queue = Queue(arguments.out, arguments.folder, deadline=time.monotonic() + arguments.limit_s)
    for phase in json.loads(arguments.plan.read_text()):
        lanes = [threading.Thread(target=queue.run_lane, args=item) for item in phase.items()]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    for name, row in queue.rows.items():
        print(f"{name:32} rc {row['rc']}  {row['seconds']:.0f} s")


@dataclass
class Queue:
    """What all lanes share."""

    out: Path
    folder: Path
    deadline: float
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run_lane(self, gpus: str, jobs: list[dict[str, Any]]) -> None:
        """Runs the jobs of a lane in turn."""
        for job in jobs:
            if self.deadline - time.monotonic() > LEAST_S:
                self.run(gpus, **job)
            else:
                self.note(job["name"], rc=None, seconds=0.0, log="")

    def run(
        self,
        gpus: str,
        *,
        name: str,
        run: str,
        limit_s: float,
        path: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        """Runs a job to its end or to its limit, and kills what is left of it."""
        result = self.folder / name
        result.mkdir(parents=True, exist_ok=True)
        folders = [str(Path.cwd()), *(str(Path.home() / each) for each in (*path, "overlay/extras", "site"))]
        variables = {
            "CUDA_VISIBLE_DEVICES": gpus,
            "RESULT": str(result),
            "PYTHONPATH": ":".join(folders),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_memory_monitor_refresh_ms": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "TMPDIR": f"/tmp/{name}",
            MARK: name,
        }
        Path(variables["TMPDIR"]).mkdir(exist_ok=True)
        begun = time.monotonic()
        log = result / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", run],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | variables | (env or {}),
                start_new_session=True,
            )
            try:
                rc: int | None = process.wait(min(limit_s, self.deadline - begun))
            except subprocess.TimeoutExpired:
                rc = None
        for stop in (signal.SIGTERM, signal.SIGKILL) if rc is None else (signal.SIGKILL,):
            kill(name, process.pid, stop)
        process.wait()
        self.note(name, rc=rc, seconds=time.monotonic() - begun, log=log.read_text(errors="replace"))

    def note(self, name: str, *, rc: int | None, seconds: float, log: str) -> None:
        """Prints and writes how a job ended."""
        with self.lock:
            print(f"=== {name}: rc {rc}, {seconds:.0f} s\n{log[-TAIL_CHARACTERS:]}\n", flush=True)
            self.rows[name] = {"rc": rc, "seconds": round(seconds, 1)}
            (self.out / "jobs.json").write_text(json.dumps(self.rows, indent=1) + "\n")
            with tarfile.open(self.out / "results.tgz", "w:gz") as archive:
                archive.add(self.folder, arcname="results", filter=small)


def small(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Returns what goes into the archive."""
    return member if member.isdir() or (member.isfile() and member.size <= LARGEST_BYTES) else None


def kill(name: str, session: int, stop: signal.Signals) -> None:
    """Sends a signal to every process of a job, and gives those that may clean up some seconds for it."""
    for each in processes(name, session):
        try:
            os.kill(each, stop)
        except ProcessLookupError:
            pass
    until = time.monotonic() + (4.0 if stop is signal.SIGTERM else 1.0)
    while time.monotonic() < until and any(processes(name, session)):
        time.sleep(0.1)


def processes(name: str, session: int) -> Iterator[int]:
    """Yields the processes of a job's session, and those whose environment has the job's mark, if they have not
    ended."""
    mark = f"{MARK}={name}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name, which may have spaces: state, parent, group, session.
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (int(of) == session or mark in (folder / "environ").read_bytes()):
                yield int(folder.name)
        except OSError:
            continue  # It has ended, or belongs to somebody else.


if __name__ == "__main__":
    main()
