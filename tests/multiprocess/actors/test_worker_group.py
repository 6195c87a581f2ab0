"""A WorkerGroup on a real Ray: results in order, and a sentence for every way to fail."""

import os
import pathlib
import pickle
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import torch

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.placement import Placement, reserve
from rlframe.cluster.roles import Topology, engines, policy
from rlframe.cluster.runtime import running
from rlframe.cluster.runtime_env import RuntimeEnvConfig
from rlframe.cluster.watch import sight
from rlframe.cluster.worker import Worker
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.utils.errors import ConfigError, DataError, OutOfMemory, RlframeError, WeightSyncFailed, WorkerDied
from tests.until import PATIENCE_S, until


class Subject(Worker):
    """Does what a test wants to see."""

    def add(self, amount: int) -> tuple[int, int]:
        """Later on lower ranks, so that answers come back in reverse."""
        time.sleep(0.2 if self.rank == 0 else 0)
        return self.rank, amount + 1

    def die(self, last_words: str) -> None:
        """Without any of Python's cleaning up."""
        print(last_words)  # noqa: T201
        os._exit(3)

    def environment(self, name: str) -> tuple[str | None, str]:
        """A variable of its environment, and its working folder."""
        return os.environ.get(name), os.getcwd()

    def fail(self, error: BaseException) -> None:
        """Raises `error`."""
        raise error

    def allocate(self, num_bytes: int) -> None:
        """Asks torch for memory on rank 1."""
        torch.empty(num_bytes if self.rank == 1 else 1, dtype=torch.uint8)

    def lose(self, peer: int) -> None:
        """The other rank dies, and this one notices at once."""
        os.kill(peer, signal.SIGKILL)
        raise RuntimeError("Connection closed by peer")

    def hang_in_a_named_place(self) -> None:
        """Longer than any test."""
        print("going to sleep")  # noqa: T201
        time.sleep(600)


class Stillborn(Worker):
    """Cannot be built on rank 1."""

    def __init__(self, *, rank: int, **more: Any):
        super().__init__(rank=rank, **more)
        if rank == 1:
            print("no such thing")  # noqa: T201
            raise RuntimeError("rank 1 is unfit")


@pytest.fixture(scope="module")
def others() -> set[psutil.Process]:
    """Processes that earlier tests have under them, such as multiprocessing's resource tracker."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def cluster(others: set[psutil.Process]) -> Iterator[ExitStack]:
    """A Ray of our own, which ends when this is closed."""
    with ExitStack() as stack:
        given = RuntimeEnvConfig(env_vars={"GIVEN_TO_WORKERS": 7})
        stack.enter_context(running(ClusterConfig(runtime_env=given), num_devices=2))
        yield stack


@pytest.fixture(scope="module")
def placement(cluster: ExitStack) -> Placement:
    """Two devices, each with room for two actors: for one of the group that stays, and for that of a test."""
    return reserve(Topology((policy(2), engines(2, colocate=True))), gpu=False, timeout_s=60)


def start(placement: Placement, folder: pathlib.Path, actor_class: type[Worker] = Subject) -> WorkerGroup:
    """A group of two that are there."""
    group = WorkerGroup(
        actor_class, role="policy", slots=placement.policy, log_folder=str(folder), num_threads=1,
        start_timeout_s=60, call_timeout_s=30,
    )  # fmt: skip
    assert len(group.infos) == 2
    return group


@pytest.fixture(scope="module")
def group(placement: Placement, tmp_path_factory: pytest.TempPathFactory) -> WorkerGroup:
    """A group for the tests that leave it alive."""
    return start(placement, tmp_path_factory.mktemp("logs"))


def name(group: WorkerGroup, rank: int) -> str:
    """What messages call a rank."""
    return f"policy rank {rank} (pid {group.infos[rank].pid} on {socket.gethostname()})"


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    assert group.wait([actor.add.remote(5) for actor in group.actors], doing="adding") == [(0, 6), (1, 6)]
    assert [info.rank for info in group.infos] == [0, 1]
    assert len({info.pid for info in group.infos}) == 2


def test_workers_have_the_variables_of_the_run_and_the_folder_of_the_driver(group: WorkerGroup) -> None:
    found = group.wait([actor.environment.remote("GIVEN_TO_WORKERS") for actor in group.actors], doing="looking")
    assert found == [("7", os.getcwd())] * 2
    assert "GIVEN_TO_WORKERS" not in os.environ


@pytest.mark.parametrize(
    "error",
    [ConfigError(["a.b must be 1, got 2", "c is unknown"]), DataError("train.jsonl:3 is empty"), WeightSyncFailed("x")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_raised_on_purpose_arrives_as_it_was(group: WorkerGroup, error: RlframeError) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(RlframeError) as caught:
        group.wait([group.actors[0].add.remote(1), group.actors[1].fail.remote(error)], doing="resume")
    assert type(caught.value) is type(error) and str(caught.value) == str(error)


def test_any_other_exception_is_a_failure_of_a_named_worker(group: WorkerGroup) -> None:
    with pytest.raises(WorkerDied) as caught:
        group.wait([group.actors[0].add.remote(1), group.actors[1].fail.remote(KeyError("lost"))], doing="train")
    message = str(caught.value)
    assert message.startswith(f"{name(group, 1)} failed in train: KeyError('lost')\nlast lines of ")
    assert "in fail" in message, "the worker's own traceback"


def test_a_rank_without_memory_names_role_rank_call_and_the_allocators_words(group: WorkerGroup) -> None:
    with pytest.raises(OutOfMemory) as caught:
        group.wait(group.ask_all(Subject.allocate, 1 << 60), doing="train")
    message = str(caught.value)
    assert message.startswith("policy rank 1 ran out of the memory of the host in allocate: ")
    assert "DefaultCPUAllocator" in message and "policy-1.log has the stack" in message
    assert "in allocate" in pathlib.Path(group.infos[1].log).read_text()


def test_a_hang_names_who_is_waited_for_and_shows_the_stack(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sight, "ANSWER_S", PATIENCE_S)
    calls = [group.actors[0].add.remote(1), group.actors[1].hang_in_a_named_place.remote()]
    group.wait(calls[:1], doing="start", ranks=[0])
    until(lambda: "going to sleep" in pathlib.Path(group.infos[1].log).read_text())
    with pytest.raises(WorkerDied) as caught:
        group.wait(calls, doing="start", timeout_s=2)
    message = str(caught.value)
    assert message.startswith(
        f"start took longer than 2 s (cluster.start_timeout_s); still waiting for {name(group, 1)}\n"
    )
    assert "policy rank 0" not in message
    assert "in hang_in_a_named_place" in message and "going to sleep" in message


def test_a_death_names_role_rank_and_host_and_quotes_the_log(placement: Placement, tmp_path: pathlib.Path) -> None:
    group = start(placement, tmp_path)
    calls = [group.actors[0].hang_in_a_named_place.remote(), group.actors[1].die.remote("last words")]
    with pytest.raises(WorkerDied) as caught:
        group.wait(calls, doing="train")
    message = str(caught.value)
    assert message.startswith(f"{name(group, 1)} died in train\nlast lines of {tmp_path}/policy-1.log:\n")
    assert "  | last words" in message and "Ray says: " in message
    group.stop()


def test_the_rank_that_died_is_named_and_not_the_one_that_lost_its_connection(
    placement: Placement, tmp_path: pathlib.Path
) -> None:
    group = start(placement, tmp_path)
    first, second = group.actors
    with pytest.raises(WorkerDied, match=r"^policy rank 1 \(pid \d+ on .*\) died in train"):
        group.wait([first.lose.remote(group.infos[1].pid), second.hang_in_a_named_place.remote()], doing="train")
    group.stop()


def test_a_worker_that_cannot_be_built_ends_the_start(placement: Placement, tmp_path: pathlib.Path) -> None:
    with pytest.raises(WorkerDied) as caught:
        start(placement, tmp_path, Stillborn)
    message = str(caught.value)
    assert message.startswith("policy rank 1 (not started) died in start\n")
    assert "  | no such thing" in message and "rank 1 is unfit" in message


def test_more_devices_than_the_cluster_has_are_refused(placement: Placement) -> None:
    with pytest.raises(ConfigError) as caught:
        reserve(Topology((policy(1000), engines(1, colocate=False))), gpu=False, timeout_s=1)
    assert (
        "train.parallel (1000 ranks) and rollout.num_engines (1) with cluster.colocate=false need 1001 CPU devices, "
        "but the cluster has " in str(caught.value)
    )


def test_devices_that_are_taken_are_not_waited_for_longer_than_the_limit(placement: Placement) -> None:
    every = max(2, len(os.sched_getaffinity(0)))
    with pytest.raises(ConfigError, match=r"which were not free within 0.5 s \(cluster.start_timeout_s\)"):
        reserve(Topology((policy(every),)), gpu=False, timeout_s=0.5)


def test_nothing_is_left_of_ray_after_the_run(
    cluster: ExitStack, group: WorkerGroup, others: set[psutil.Process]
) -> None:
    """Comes last: it ends the Ray of this module."""
    mine = [process for process in psutil.Process().children(recursive=True) if process not in others]
    names = [process.name() for process in mine]
    assert any("raylet" in each for each in names) and any("Subject" in each for each in names)
    cluster.close()
    _, alive = psutil.wait_procs(mine, timeout=PATIENCE_S)
    assert [process.name() for process in alive] == []
