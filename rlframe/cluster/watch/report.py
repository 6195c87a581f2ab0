"""The sentences of the watchdog: late workers, their states, collectives and last actions, and late attempts."""

from collections.abc import Mapping, Sequence

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.activities import Activity
from rlframe.cluster.watch.flight import Flight, absent
from rlframe.cluster.watch.looking import driver_stack, halted_processes, look_at
from rlframe.cluster.watch.sight import Sight, State

REASONS = {
    State.STOPPED: "is stopped (`kill -CONT {pid}` continues it)",
    State.DEAD: "is dead",
    State.UNKNOWN: "is out of sight: its machine does not answer",
}


def account(activity: Activity) -> str:
    """Returns which workers `activity` waits for, and why: a line with the names and with what attempts wait for, then
    a paragraph each with stack and log, the likely causes first."""
    workers, attempts = list(activity.waits_for), [str(wait) for wait in activity.known_waits()]
    sights = look_at(workers)
    order = sorted(range(len(workers)), key=lambda place: rank_of_blame(workers, sights, place))
    halted = halted_processes(workers)
    names = [
        str(workers[place]) + (f", which {reason}" if (reason := reason_of(workers[place], sights[place])) else "")
        for place in order
    ]
    names += [f"{name} (not started)" for name in activity.not_started]
    head = [f"still waiting for {', '.join(names)}"] if names else []
    if not names and not attempts:
        head = ["the driver itself is late"]
    lines = ["; ".join([*head, *attempts, *halted])]
    flights = {workers[place].rank: flight for place in order if (flight := sights[place].flight)}
    lines += [paragraph(workers[place], sights[place], flights) for place in order]
    if (workers or not attempts) and all(sight.can_answer and idle(sight) for sight in sights):
        lines.append(driver_stack(activity.thread))
    return "\n".join(line for line in lines if line)


def reason_of(worker: WorkerInfo, sight: Sight) -> str:
    """Returns why this worker cannot answer. Empty if it can."""
    return REASONS[sight.state].format(pid=worker.pid) if sight.state in REASONS else ""


def idle(sight: Sight) -> bool:
    """Returns whether the worker has finished its calls, so that its answer must be on the way."""
    return sight.last.endswith(": done")


def rank_of_blame(workers: Sequence[WorkerInfo], sights: Sequence[Sight], place: int) -> int:
    """Returns 0 for a worker that cannot answer, 1 for one that others wait for in a collective or that waits in none,
    2 for those who wait there."""
    if sights[place].state in REASONS:
        return 0
    flights = {worker.rank: sight.flight for worker, sight in zip(workers, sights, strict=True) if sight.flight}
    mine = flights.get(workers[place].rank)
    return 2 if mine and mine.inside else 1


def paragraph(worker: WorkerInfo, sight: Sight, flights: Mapping[int, Flight]) -> str:
    """Returns the paragraph about one worker."""
    said = [f"{worker}:"]
    if sight.last and sight.age_s is not None:
        said.append(f"last did {sight.last!r} {sight.age_s:.0f} s ago;")
    if sight.last and sight.can_answer and idle(sight):
        said.append("it has done its part, and its answer has not come through Ray;")
    found = absent(flights, worker.rank) if worker.rank in flights else None
    if found:
        entered, missing = found
        said.append(f"waits in {entered}, where rank {', '.join(map(str, missing))} has not arrived;")
    elif (flight := sight.flight) and flight.inside:
        said.append(f"is in {flight.inside[0]};")
    said.append(f"it {reason_of(worker, sight) or f'is {sight.state}'}")
    lines = [" ".join(said)]
    if sight.stack:
        lines += ["its stacks, innermost first:", sight.stack]
    return "\n".join([*lines, sight.log])
