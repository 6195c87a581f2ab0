"""Profiles of a step in which something fails: no process goes on recording."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.placement import reserve
from rlframe.cluster.profiling.config import ProfileConfig
from rlframe.cluster.roles import Topology, policy
from rlframe.cluster.runtime import running
from rlframe.cluster.watch.activities import phase
from rlframe.cluster.worker import Worker
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.loops.profiler import Process, Profiler
from rlframe.utils.errors import WorkerDied

pytestmark = pytest.mark.thorough
"""The usual profile is that of tests/e2e/test_profiles.py."""


class Subject(Worker):
    """A process whose rank 1 knows no phase `train`."""

    def enter_phase(self, name: str) -> None:
        """As Worker, but on rank 1."""
        if self.rank == 1 and name == "train":
            raise RuntimeError("no such phase")
        super().enter_phase(name)

    def is_recorded(self) -> bool:
        """Whether a record is under way."""
        return self._recording is not None


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup[Subject]]:
    with running(ClusterConfig(), num_devices=2):
        yield WorkerGroup(
            Subject, role="policy", slots=reserve(Topology((policy(2),)), gpu=False, timeout_s=60).policy,
            log_folder=str(tmp_path_factory.mktemp("logs")), num_threads=1, start_timeout_s=60, call_timeout_s=30,
        )  # fmt: skip


def recorded(group: WorkerGroup[Subject]) -> list[bool]:
    return group.wait(group.ask_all(Subject.is_recorded), doing="look")


def profiler(group: WorkerGroup[Subject], folder: Path, said: list[str]) -> Profiler:
    processes = [Process(role="policy", rank=rank, workers=group) for rank in range(2)]
    config = ProfileConfig(steps=[2])
    return Profiler(config, folder, processes, with_driver=False, marks={}, say=said.append)


def test_a_process_that_fails_to_enter_a_phase_is_recorded_no_more(group: WorkerGroup[Subject], tmp_path: Path) -> None:
    said: list[str] = []
    with profiler(group, tmp_path, said).around(2):
        assert recorded(group) == [True, True]
        with phase("train"):
            assert recorded(group) == [True, False]
    assert recorded(group) == [False, False]
    assert len(said) == 1
    assert {each.name for each in (tmp_path / "profiles/step_2").iterdir()} == {
        "policy_0.json.gz",
        "summary.json",
        "summary.md",
    }


def test_processes_that_outlive_a_step_that_failed_are_recorded_no_more(
    group: WorkerGroup[Subject], tmp_path: Path
) -> None:
    said: list[str] = []
    step = profiler(group, tmp_path, said)
    with pytest.raises(WorkerDied), step.around(2), phase("rollout"):
        assert recorded(group) == [True, True]
        raise WorkerDied("policy rank 7 died in train")
    # Engines live on while the ranks restart, and the steps since the last checkpoint are done again.
    assert recorded(group) == [False, False] and not said
    with step.around(1):
        assert recorded(group) == [False, False]
    with step.around(2):
        assert recorded(group) == [True, True]
    assert len(said) == 1
