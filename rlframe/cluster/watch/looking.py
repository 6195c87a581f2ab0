"""Looks at workers on all machines, and at the driver's other processes, without hanging itself."""

import os
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.network import is_here
from rlframe.cluster.watch.sight import RAY_SERVERS, Sight, State, look

REMOTE_S = 8.0
"""Seconds that other machines may take to answer."""
ASKING = threading.Lock()
"""Held while a thread beside the main one waits for Ray. Ray is left by whoever holds it: a thread that waits for Ray
when it is shut down ends the whole process, with exit code 1 and without a word (Ray 2.60, `EnsureInitialized`)."""
MOST_FRAMES = 12
DEAD = "dead: "


def look_at(workers: Sequence[WorkerInfo], *, closely: bool = True) -> list[Sight]:
    """Returns the state of each worker. Takes two seconds, and ten if other machines do not answer."""
    places = [place for place, worker in enumerate(workers) if is_here(worker.host, worker.address)]
    # Ray may be what hangs, so a separate thread asks it, which can be left behind.
    answers: queue.SimpleQueue[list[Sight]] = queue.SimpleQueue()
    others = [worker for worker in workers if not is_here(worker.host, worker.address)]
    if others:
        arguments = (others, closely, answers)
        threading.Thread(target=look_remotely, args=arguments, name="watch others", daemon=True).start()
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(places)))) as pool:
        seen = list(pool.map(lambda place: look(workers[place].log, workers[place].pid, closely=closely), places))
    sights = dict(zip(places, seen, strict=True))
    try:
        far = answers.get(timeout=REMOTE_S) if others else []
    except queue.Empty:
        far = [Sight(state=State.UNKNOWN)] * len(others)
    rest = iter(far)
    return [sights[place] if place in sights else next(rest) for place in range(len(workers))]


def look_remotely(workers: Sequence[WorkerInfo], closely: bool, answers: "queue.SimpleQueue[list[Sight]]") -> None:
    """Puts into `answers` the results of tasks that look at the workers on their nodes. Nothing is known of them if the
    run has left Ray meanwhile."""
    try:
        with ASKING:
            answers.put(remote_sights(workers, closely))
    except RayError:
        answers.put([Sight(state=State.UNKNOWN)] * len(workers))


def remote_sights(workers: Sequence[WorkerInfo], closely: bool) -> list[Sight]:
    """Returns the results of such tasks."""
    task: Any = ray.remote(look)
    calls = [
        task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(worker.node_id, soft=False)).remote(
            worker.log, worker.pid, closely=closely
        )
        for worker in workers
    ]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=REMOTE_S / 2)
    sights = []
    for call in calls:
        try:
            sights.append(ray.get(call, timeout=1) if call in done else Sight(state=State.UNKNOWN))
        except RayError:
            sights.append(Sight(state=State.UNKNOWN))
    return sights


def halted_processes(workers: Sequence[WorkerInfo] = ()) -> list[str]:
    """Returns the stopped processes of the driver and the dead ones of Ray's servers: `stopped: raylet (pid 7)`. Actors
    and `workers` are left out, because they are looked at one by one."""
    known = {worker.pid for worker in workers}
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            status, name = status_and_title(process)
        except psutil.NoSuchProcess:
            continue
        if name.startswith("ray::") or process.pid in known:
            continue
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            found.append(f"stopped: {name} (pid {process.pid})")
        elif status == psutil.STATUS_ZOMBIE and name in RAY_SERVERS:
            found.append(f"{DEAD}{name} (pid {process.pid})")
    return found


def status_and_title(process: psutil.Process) -> tuple[str, str]:
    """Returns what psutil says of a process, and its `title`."""
    try:
        return process.status(), title(process)
    except psutil.ZombieProcess:
        # Such has no command line, but a name.
        return psutil.STATUS_ZOMBIE, process.name()


def title(process: psutil.Process) -> str:
    """Returns the name of a process: the module that Python runs in it, or its program."""
    command = process.cmdline()
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return process.name()


def driver_stack(thread: int) -> str:
    """Returns the innermost frames of a thread of this process."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    lines = "".join(traceback.format_stack(frame)[-MOST_FRAMES:]).splitlines()
    return "\n".join([f"the driver (pid {os.getpid()}) is at:", *(f"  | {line}" for line in lines)])
