"""Reads a trace of torch.profiler, of a rank or of an engine, and says where its time went."""

import gzip
import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlframe.cluster.profiling.stacks import EVERY_S

TRACE, STACKS = ".json.gz", ".folded.txt"
"""Ends of the names of traces and of sampled stacks."""
MOST_BYTES = 256 << 20
"""Greatest size of a trace, compressed, that is read."""
MOST_ROWS = 15
"""Number of operators, kernels and functions of a summary."""
LEAST_GAP_S = 20e-6
"""Shortest time between two kernels that counts as a gap."""
COLLECTIVE = re.compile(r"^(nccl|gloo:|c10d::)|nccl(Dev)?Kernel", re.IGNORECASE)
"""Names of collectives: kernels of NCCL, and the work of Gloo's threads."""
Interval = tuple[float, float]
"""Begin and end, in microseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The share of one operator, kernel or function."""

    name: str
    seconds: float
    """Seconds in itself, without what it has called."""
    count: int
    """Number of calls, or of samples."""


@dataclass(kw_only=True, slots=True)
class Summary:
    """The content of the profile of one process. A value is None where the profile cannot tell."""

    files: list[str] = field(default_factory=list)
    """Names of the files."""
    seconds: float | None = None
    """Seconds from the first to the last event."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds in each phase's calls."""
    operators: list[Row] = field(default_factory=list)
    """Operators of the CPU that took most, by their own time."""
    kernels: list[Row] = field(default_factory=list)
    """Kernels of the GPU that took most."""
    functions: list[Row] = field(default_factory=list)
    """Python functions that took most, by their own samples."""
    collectives_fraction: float | None = None
    """Fraction of the time in which a collective was under way; it waits there for the slowest rank."""
    gpu_busy_fraction: float | None = None
    """Fraction of the time between the first and the last kernel in which one ran."""
    gaps: int | None = None
    """Number of gaps between kernels."""
    longest_gap_s: float | None = None
    note: str = ""
    """Reason why there is no more."""


def summarise(files: Sequence[pathlib.Path], *, phases: Collection[str] = ()) -> Summary:
    """Returns what the files of a process say.

    Args:
        phases: names of the phases that its trace may have.
    """
    found = Summary(files=[file.name for file in files])
    for file in files:
        if file.name.endswith(STACKS):
            found.functions = functions(file.read_text(encoding="utf-8").splitlines())
        elif file.name.endswith(TRACE):
            _read_trace(found, file, phases)
    return found


def _read_trace(found: Summary, file: pathlib.Path, phases: Collection[str]) -> None:
    """Adds what a trace says. Of several ranks of an engine it is the first one's."""
    if found.seconds is not None:
        return
    if file.stat().st_size > MOST_BYTES:
        found.note = f"{file.name} is too large to be summarised"
        return
    events = [event for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if "dur" in event]
    of = by_category(events)
    whole = [interval(event) for kind in ("cpu_op", "user_annotation", "kernel") for event in of[kind]]
    if not whole:
        found.note = f"{file.name} has no events"
        return
    span = max(end for _, end in whole) - min(begin for begin, _ in whole)
    found.seconds = span / 1e6
    for name in phases:
        found.phases[name] = sum(event["dur"] for event in of["user_annotation"] if event["name"] == name) / 1e6
    found.operators = rows(own_times(of["cpu_op"]))
    found.kernels = rows((event["name"], event["dur"]) for event in of["kernel"])
    waits = [event for event in of["kernel"] or [*of["cpu_op"], *of["user_annotation"]] if is_collective(event)]
    found.collectives_fraction = sum(end - begin for begin, end in union(map(interval, waits))) / span
    if of["kernel"]:
        _read_gaps(found, union(interval(event) for kind in ("kernel", "gpu_memcpy") for event in of[kind]))


def _read_gaps(found: Summary, busy: Sequence[Interval]) -> None:
    """Adds how well the GPU was busy."""
    gaps = [after[0] - before[1] for before, after in zip(busy[:-1], busy[1:], strict=True)]
    long = [gap for gap in gaps if gap >= LEAST_GAP_S * 1e6]
    found.gpu_busy_fraction = 1 - sum(gaps) / max(1e-9, busy[-1][1] - busy[0][0])
    found.gaps = len(long)
    found.longest_gap_s = max(long, default=0.0) / 1e6


def by_category(events: Iterable[Mapping[str, Any]]) -> defaultdict[str, list[Mapping[str, Any]]]:
    """Returns the events of each category."""
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        found[event.get("cat", "")].append(event)
    return found


def interval(event: Mapping[str, Any]) -> Interval:
    """Returns begin and end of an event."""
    return event["ts"], event["ts"] + event["dur"]


def is_collective(event: Mapping[str, Any]) -> bool:
    """Returns whether an event is a collective, or a wait for one."""
    return bool(COLLECTIVE.search(event["name"]))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the intervals with those merged that overlap, in their order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def own_times(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yields the name and the own microseconds of each event: without the events inside it, in its thread."""
    threads: defaultdict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        threads[(event.get("pid"), event.get("tid"))].append(event)
    for own in threads.values():
        # An event inside another one begins later, or at the same time and is shorter.
        own.sort(key=lambda event: (event["ts"], -event["dur"]))
        inside = [0.0] * len(own)
        around: list[int] = []
        for place, event in enumerate(own):
            while around and interval(own[around[-1]])[1] <= event["ts"]:
                around.pop()
            if around:
                inside[around[-1]] += event["dur"]
            around.append(place)
        yield from ((event["name"], max(0.0, event["dur"] - less)) for event, less in zip(own, inside, strict=True))


def functions(lines: Iterable[str]) -> list[Row]:
    """Returns the functions that were running in most samples, from lines of sampled stacks."""
    counts: defaultdict[str, int] = defaultdict(int)
    for line in lines:
        stack, _, count = line.rpartition(" ")
        counts[stack.rpartition(";")[2]] += int(count)
    most = sorted(counts, key=lambda name: -counts[name])[:MOST_ROWS]
    return [Row(name=name, seconds=counts[name] * EVERY_S, count=counts[name]) for name in most]


def rows(times: Iterable[tuple[str, float]]) -> list[Row]:
    """Returns the names with the most microseconds."""
    sums: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for name, microseconds in times:
        sums[name] += microseconds
        counts[name] += 1
    most = sorted(sums, key=lambda name: -sums[name])[:MOST_ROWS]
    return [Row(name=name, seconds=sums[name] / 1e6, count=counts[name]) for name in most]
