"""A pool does what it is given, whatever it is, and a task that misbehaves costs itself alone."""

import os
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

from rlframe.processes.pool import Pool, wait
from rlframe.processes.process import Process
from rlframe.processes.work import Failed, Limits, PoolError, Several, Work
from rlframe.processes.worker import described
from rlframe.rewards.base import Attempt
from rlframe.rewards.config import RewardTerm
from rlframe.rewards.scoring import Scoring
from rlframe.types.rollout import FinishReason
from rlframe.utils.outside import module_of_file
from tests.unit.processes.works import Arithmetic, Broken, Calculator, Deadly, Slow
from tests.until import under_a_fair_limit, until

pytestmark = pytest.mark.later


def pool(work: Work, *, timeout_s: float = 20.0, size: int = 2) -> Pool:
    """Returns a pool of two."""
    return Pool(work, Limits(timeout_s=timeout_s, memory_gb=1.0), size=size, name="sum")


def test_values_come_in_the_order_of_the_tasks() -> None:
    with pool(Arithmetic(bias=1)) as sums:
        assert sums.run([[index, 1] for index in range(300)]) == [{"sum": index + 2} for index in range(300)]
        assert sums.run([]) == []

        assert len(set(sums.run(["who"] * 40))) <= 2


def test_a_task_that_misbehaves_costs_itself_alone() -> None:
    tasks = [[1, 1], "hang", [1, 2], "leave", [0, 0], "too long", "no JSON", "long", [1, 3]]

    def done(limit_s: float) -> list[list[Any]]:
        with pool(Arithmetic(), timeout_s=limit_s, size=1) as sums:
            return [sums.run(tasks) for _ in range(2)]

    def late(found: list[list[Any]]) -> list[int]:
        """The tasks that took too long."""
        return [
            index for values in found for index, value in enumerate(values)
            if isinstance(value, Failed) and "took longer" in value.why
        ]  # fmt: skip

    for found in under_a_fair_limit(done, lambda found: late(found) == [1, 1], first_s=1.5):
        assert [found[index] for index in (0, 2, 8)] == [{"sum": 2}, {"sum": 3}, {"sum": 4}]
        assert found[7] == "x" * 50_000
        failed = {tasks[index]: found[index].why for index in (1, 3, 5, 6)}
        assert failed["hang"].startswith("took longer than 1") and "exit code 7" in failed["leave"]
        assert failed["too long"] == "an answer must have at most 65536 bytes of JSON, got 70002"
        assert failed["no JSON"].startswith("TypeError: ") and "(at " not in failed["no JSON"]
        assert found[4] == Failed("nothing to add"), "in the task's own words"


def test_the_first_task_of_a_kind_in_a_process_may_take_longer() -> None:
    limits = Limits(timeout_s=0.3, memory_gb=1.0, first_s=60.0)
    with Pool(Slow(), limits, size=1, name="nap") as naps:
        first = naps.run([["a", 0.6], ["b", 0.6], ["b", 0.0]])
        assert first == [None, None, None]
        assert naps.run([["a", 600.0]]) == [Failed("took longer than 0.3 s")]
        assert naps.run([["a", 0.6]]) == [None], "in the process that took its place"
    assert Several({"nap": Slow()}).kind(("nap", ["a", 0.1])) == "nap a"


def test_an_answer_that_came_in_time_counts_though_nobody_was_there_to_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def kept(workers: Sequence[Process], *arguments: Any, **named: Any) -> set[int]:
        """Looks; and after the second look this process is kept from its work until the answer is there, and late."""
        looks.append(wait(workers, *arguments, **named))
        if len(looks) != 2:
            return looks[-1]
        until(lambda: connection.wait(workers[0].readable, 0))
        until(lambda: time.monotonic() > workers[0].deadline)
        return set()

    with pool(Arithmetic(), timeout_s=1.0, size=1) as sums:
        sums.run([[1, 1]])
        monkeypatch.setattr("rlframe.processes.pool.wait", kept)
        assert sums.run([[2, 2]]) == [{"sum": 4}] and len(looks) >= 2


def test_tasks_may_come_while_others_run(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with pool(Arithmetic(gate=str(gate)), timeout_s=600.0) as sums:
        sums.run([[1, 1]])
        (slow,) = sums.submit(["slow"])
        assert sums.take(wait_s=0.05) == {}
        (quick,) = sums.submit([[2, 2]])
        assert sums.take() == {quick: {"sum": 4}}
        gate.touch()
        assert sums.take() == {slow: None}
        # Nothing is left to wait for, for ever.
        assert sums.take() == {}


def test_environments_and_rewards_share_processes() -> None:
    attempt = Attempt(
        prompt_text="q", response_text="42", answer="42", num_response_tokens=2, finish_reason=FinishReason.STOP
    )
    works = {"reward": Scoring({"right": RewardTerm(name="exact_match")}), "tool": Calculator(), "sum": Arithmetic()}
    with pool(Several(works), size=1) as both:
        tasks = [("reward", ("right", [attempt])), ("tool", (3, "go")), ("sum", "who"), ("sum", "who")]
        score, step, one, other = both.run(tasks)
    assert score == [1.0] and step == {"state": 4, "reply": "step 3: GO"} and one == other


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (Broken(), "a sum worker cannot start: ValueError: no such tool"),
        (Deadly(), "sum workers? cannot start: .*ended the worker process .exit code 3.; it printed last: last words"),
    ],
)
def test_work_that_cannot_be_prepared_is_a_sentence(work: Work, sentence: str) -> None:
    with pool(work) as sums:
        with pytest.raises(PoolError, match=sentence):
            sums.run([[1, 1]])
        with pytest.raises(AssertionError, match="closed"):
            sums.run([[1, 1]])
    with pool(work, size=1) as sums, pytest.raises(PoolError, match="a sum worker cannot start"):
        sums.try_start()


def test_a_worker_that_the_system_does_not_start_is_a_sentence() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pool(Arithmetic(), size=1) as sums:
        sums.run([[1, 1]])
        # Enough to end the worker, and too few for the pipes of another.
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        try:
            with pytest.raises(PoolError, match="a sum worker cannot start: Too many open files"):
                sums.run(["leave"])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def said_of(do: Callable[[], Any]) -> str:
    """What is said of the error that `do` raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the sentence is what is tested
        do()
    return described(caught.value)


def test_an_error_is_told_with_the_line_of_the_users_code(tmp_path: Path) -> None:
    file = tmp_path / "kinder" / "rewards.py"
    file.parent.mkdir()
    file.write_text("import json\ndef f(text):\n    return json.loads(text)\ndef g(text):\n    raise KeyError(text)\n")
    module = module_of_file(str(file))
    said = said_of(lambda: module.f("{"))
    assert said.startswith("JSONDecodeError: ") and said.endswith(" (at kinder/rewards.py:3)"), "the line not in json"
    assert said_of(lambda: module.g("key")) == "KeyError: 'key' (at kinder/rewards.py:5)"
    long = said_of(lambda: module.g("x" * 2000))
    assert len(long) == 600 and long.endswith("x (at kinder/rewards.py:5)")


def test_what_tasks_print_is_passed_on_cut() -> None:
    with pool(Arithmetic(), size=1) as sums:
        assert sums.run(["talk", [1, 1]]) == [None, {"sum": 2}]
        told = list(sums.printed())
        assert [line.split()[0] for line in told] == [str(number) for number in range(10, 30)]
        assert {len(line) for line in told} == {200}
        assert list(sums.printed()) == []
