"""Restarts: which failures are outlived, how often, and what is said."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlframe.loops.restarts import Restarts
from rlframe.utils.errors import RlframeError, WeightSyncFailed, WorkerDied

DEATH = "policy rank 1 (pid 7 on host) died in {}\nlast lines of policy-1.log:\n  | last words"


class Ranks:
    """Groups of which the ranks die and are replaced as a test says."""

    def __init__(self) -> None:
        self.dead: list[WorkerDied] = []
        self.workers = SimpleNamespace(deaths=lambda: self.dead)

    def start_anew(self) -> str:
        """All of them live."""
        self.dead = []
        return "step-00000002"

    def die(self, error: RlframeError) -> None:
        """A rank ends, which the run sees as `error`."""
        self.dead = [WorkerDied(DEATH.format("the run"))]
        raise error


@pytest.fixture
def ranks() -> Ranks:
    """All alive."""
    return Ranks()


def retry_after_restart(ranks: Any, limit: int, *errors: RlframeError, dead: bool = True) -> int:
    """How often work is begun that ends with each of `errors` in turn, and then well."""
    left, begun = list(errors), 0

    def work() -> None:
        nonlocal begun
        begun += 1
        if left and dead:
            ranks.die(left.pop(0))
        if left:
            raise left.pop(0)

    Restarts(limit, [ranks], start_anew=ranks.start_anew).retry_after_restart(work)
    return begun


def test_work_is_begun_again_after_each_death(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert retry_after_restart(ranks, 3, WorkerDied(DEATH.format("train")), WorkerDied(DEATH.format("train"))) == 3
    assert [record.getMessage() for record in caplog.records] == [
        DEATH.format("train"),
        "restarted the trainer's ranks from step-00000002; cluster.max_restarts=3 leaves 2 more",
        DEATH.format("train"),
        "restarted the trainer's ranks from step-00000002; cluster.max_restarts=3 leaves 1 more",
    ]


def test_one_death_too_many_ends_the_run_with_its_cause(ranks: Ranks) -> None:
    with pytest.raises(WorkerDied) as caught:
        retry_after_restart(ranks, 1, WorkerDied(DEATH.format("train")), WorkerDied(DEATH.format("logprobs")))
    assert str(caught.value) == (
        f"{DEATH.format('logprobs')}\ncluster.max_restarts=1: the trainer's ranks are not restarted again"
    )


@pytest.mark.parametrize("error", [WorkerDied("policy rank 0 failed in train: NaN"), WeightSyncFailed("x differs")])
def test_what_went_wrong_without_a_death_ends_the_run(ranks: Ranks, error: RlframeError) -> None:
    with pytest.raises(type(error)) as caught:
        retry_after_restart(ranks, 3, error, dead=False)
    assert caught.value is error


def test_what_only_suffered_from_a_death_is_told_after_it(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    assert retry_after_restart(ranks, 1, WeightSyncFailed("cannot map the weights of process 7")) == 2
    said = caplog.records[0].getMessage()
    assert said == f"{DEATH.format('the run')}\nIt ended: cannot map the weights of process 7"


def test_a_death_that_the_work_did_not_notice_is_told_and_the_work_done_again(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as that of a rank that has given its part of the last export."""
    begun = []

    def work() -> int:
        begun.append(ranks.dead)
        ranks.dead = [WorkerDied(DEATH.format("the run"))] if len(begun) == 1 else []
        return len(begun)

    restarts = Restarts(1, cast(Any, [ranks]), start_anew=ranks.start_anew)
    assert restarts.retry_after_restart(work) == 2 and begun == [[], []]
    assert [record.getMessage() for record in caplog.records] == [
        DEATH.format("the run"),
        "restarted the trainer's ranks from step-00000002; cluster.max_restarts=1 leaves 0 more",
    ]
    begun.clear()
    with pytest.raises(WorkerDied, match="cluster.max_restarts=1: the trainer's ranks are not restarted again"):
        restarts.retry_after_restart(work)


def test_a_death_while_ranks_start_anew_counts_too(ranks: Ranks) -> None:
    starts = []

    def start_anew() -> str:
        starts.append(1)
        if len(starts) == 1:
            ranks.die(WorkerDied("policy rank 0 (not started) died in restart"))
        return ranks.start_anew()

    def work() -> None:
        if not starts:
            ranks.die(WorkerDied(DEATH.format("train")))

    restarts = Restarts(2, [ranks], start_anew=start_anew)  # pyright: ignore[reportArgumentType]
    restarts.retry_after_restart(work)
    assert restarts.num_restarts == len(starts) == 2
