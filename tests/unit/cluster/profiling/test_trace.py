"""What a trace says, by hand: own times, phases, waits for collectives, and gaps between kernels."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlframe.cluster.profiling.trace import Row, functions, summarise, union


def event(name: str, ts: float, dur: float, *, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}


def in_microseconds(rows: list[Row]) -> list[tuple[str, int, int]]:
    return [(row.name, round(row.seconds * 1e6), row.count) for row in rows]


def trace(folder: Path, *events: dict[str, Any]) -> Path:
    file = folder / "policy_0.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "thread_name"}]}).encode()))
    return file


def test_the_own_time_of_an_operator_is_without_those_inside_it(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        event("train", 0, 1000, cat="user_annotation"),
        event("aten::linear", 100, 500),
        event("aten::t", 100, 100),
        event("aten::mm", 200, 300),
        event("aten::mm", 700, 200),
        # Another thread at the same time takes nothing away.
        event("aten::mul", 200, 300, tid=2),
    )
    found = summarise([file], phases=["train", "rollout"])
    assert found.files == ["policy_0.json.gz"]
    assert found.seconds == pytest.approx(1e-3)
    assert found.phases == {"train": pytest.approx(1e-3), "rollout": 0.0}
    assert in_microseconds(found.operators) == [
        ("aten::mm", 500, 2),
        ("aten::mul", 300, 1),
        ("aten::linear", 100, 1),
        ("aten::t", 100, 1),
    ]
    assert found.collectives_fraction == 0 and found.gpu_busy_fraction is None


def test_collectives_of_several_threads_count_once(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        event("aten::mm", 0, 1000),
        event("c10d::allreduce_", 100, 100),
        event("gloo:all_reduce", 150, 250, cat="user_annotation", tid=2),
    )
    assert summarise([file]).collectives_fraction == pytest.approx(0.3)


def test_gaps_are_where_no_kernel_runs_on_any_stream(tmp_path: Path) -> None:
    kernels = [
        event("gemm", 0, 400, cat="kernel", tid=7),
        event("ncclDevKernel_AllReduce", 300, 200, cat="kernel", tid=8),
        event("gemm", 510, 90, cat="kernel", tid=7),
        event("gemm", 800, 200, cat="kernel", tid=7),
    ]
    found = summarise([trace(tmp_path, event("aten::mm", 0, 50), *kernels)])
    assert found.gpu_busy_fraction == pytest.approx(1 - 210e-6 / 1000e-6)
    assert found.gaps == 1, "10 us are the time of a launch"
    assert found.longest_gap_s == pytest.approx(200e-6)
    assert found.collectives_fraction == pytest.approx(0.2)
    assert in_microseconds(found.kernels)[0] == ("gemm", 690, 3)


def test_a_trace_without_events_says_so(tmp_path: Path) -> None:
    found = summarise([trace(tmp_path)])
    assert found.seconds is None and "no events" in found.note


def test_functions_have_the_samples_in_themselves() -> None:
    lines = ["main.py:run;a.py:wait 30", "main.py:run;a.py:wait;b.py:inner 5", "main.py:run 2"]
    assert [(row.name, row.count) for row in functions(lines)] == [
        ("a.py:wait", 30),
        ("b.py:inner", 5),
        ("main.py:run", 2),
    ]
    assert functions(lines)[0].seconds == pytest.approx(0.3)


def test_intervals_that_touch_are_one() -> None:
    assert union([(5, 6), (0, 2), (2, 3), (1, 1.5)]) == [(0, 3), (5, 6)]
