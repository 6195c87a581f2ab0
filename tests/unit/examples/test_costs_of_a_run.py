"""Benchmarks of what a run does beside training: what they put in the place of a part of it still fits there."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from rlframe.attempts.worker import RunnerCalls
from rlframe.loops.reporting.metrics import MetricsLog, Seen
from rlframe.rollout.fleet.worker import EngineWorker

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import attempts
import metrics_overhead
import report_page


def parameters(function: Any) -> list[str]:
    """Returns the names of a function's parameters but the first, without the one that Ray adds."""
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"][1:]


def test_what_stands_for_a_function_that_tells_takes_its_arguments() -> None:
    assert parameters(metrics_overhead.nothing_seen) == parameters(vars(Seen)["of"].__func__)
    assert parameters(metrics_overhead.nothing_kept) == parameters(MetricsLog.choose_samples)
    assert metrics_overhead.nothing_seen(Seen, [], None).predicted == 0


@pytest.mark.parametrize("name", ["generate", "generate_each"])
def test_the_simulated_engine_is_called_as_an_engine_is(name: str) -> None:
    mine, asked = (inspect.signature(getattr(each, name)).parameters for each in (attempts.Engine, EngineWorker))
    assert mine["requests"] == asked["requests"]


def test_the_simulated_engine_gets_tasks_as_a_runner_does() -> None:
    tasks = attempts.tasks(0, 2, attempts.CASES["fast"])
    assert [len(task.group.rollouts) for task in tasks.objects()] == [attempts.GROUP_SIZE] * 2
    annotation = inspect.signature(attempts.tasks).return_annotation
    assert annotation == inspect.signature(RunnerCalls.start).parameters["tasks"].annotation


@pytest.mark.thorough
def test_the_run_that_a_page_is_made_of_is_written_as_a_run_is(tmp_path: Path) -> None:
    report_page.write_run(tmp_path, steps=1, prompts=1, group=2, prompt_tokens=3, tokens=5)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"area_0/other_0_nats"' in line
