"""Runs on a cluster of machines with addresses, names and folders of their own: ranks and engines on both, syncs
between them, a machine that dies, and folders that only one of them has.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiprocess.machines import Machine, Machines, refusal
from tests.multiprocess.program import DEADLINE_S, LEARNING, metrics

NAMES = ("head", "node-a", "node-b")
QUICK = LEARNING | {
    "steps": 2,
    "train.parallel": "d2",
    "rollout.num_engines": 2,
    "checkpoint.every_steps": 1,
    "cluster.device": "auto",
}
WHY = refusal()
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(WHY), reason=f"no namespaces here: {WHY}"),
]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three machines, of which two have a device each."""
    with Machines(tmp_path_factory.mktemp("network"), NAMES) as machines:
        machines.start_ray([0, 1, 1])
        yield machines


def ended(
    network: Machines, machine: Machine, settings: dict[str, object], folder: Path, **options: str
) -> tuple[int, str]:
    """The exit code of a run on a machine, and what it said."""
    program, output = network.rlframe(machine, settings, folder=folder / "work", **options)
    return program.wait(timeout=2 * DEADLINE_S), output.read_text()


def test_ranks_and_engines_of_two_nodes_train_together(network: Machines, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Relative to the driver's folder, which is not where Ray was started.
    code, said = ended(network, network.all[0], QUICK | {"output": "../run"}, tmp_path)
    assert code == 0, said
    assert [line["step"] for line in metrics(folder) if "train/loss" in line] == [1, 2]
    assert "declares 0 GPUs" in said and "so cluster.device=auto is cpu" in said
    assert "transport nccl: ranks are on 2 hosts" in said
    assert (folder / "checkpoints/step-00000002").is_dir() and (folder / "model/model.safetensors").is_file()
    assert {file.name for file in (folder / "logs").glob("policy-*.log")} == {"policy-0.log", "policy-1.log"}
    assert list(folder.glob(".seen-*")) == []


def test_weights_travel_between_nodes(network: Machines, tmp_path: Path) -> None:
    apart = {"train.parallel": "d1", "rollout.num_engines": 1, "cluster.colocate": "false", "output": tmp_path / "run"}
    code, said = ended(network, network.all[0], QUICK | apart, tmp_path)
    assert code == 0, said
    assert "transport nccl: " in said and "source 0 -> destination 0 (network)" in said, said


def test_a_folder_that_one_node_has_alone_is_refused_before_training(network: Machines, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    network.all[2].do("mount", "-t", "tmpfs", "tmpfs", str(local))
    code, said = ended(network, network.all[0], QUICK | {"output": local / "run"}, tmp_path)
    assert code == 2, said
    assert "output must be a folder that every node shares: on node node-b (198.51.100.3): " in said
    assert "has 1 fault" in said and not list(local.glob("run/logs/policy-*"))
    assert metrics(local / "run") == []


def test_gpus_that_are_declared_and_not_there_end_in_a_sentence(tmp_path: Path) -> None:
    with Machines(tmp_path / "network", NAMES[:2]) as network:
        network.start_ray([0, 1], gpus=[0, 1])
        small = QUICK | {"train.parallel": "d1", "rollout.num_engines": 1, "output": tmp_path / "run"}
        code, said = ended(network, network.all[0], small, tmp_path)
    assert code == 2, said
    assert "declares 1 GPUs (head (198.51.100.1): 0, node-a (198.51.100.2): 1), so cluster.device=auto is cuda" in said
    assert "cluster.device must be cpu or auto on node-a, where torch finds no CUDA device, got cuda: torch" in said
    assert "Traceback" not in said


def start_endless(network: Machines, folder: Path, **settings: object) -> tuple[object, Path]:
    """A run on two nodes that has done three steps and goes on. Its program, and what it says."""
    endless = QUICK | {"steps": 100000, "output": folder / "run", "cluster.start_timeout_s": 60} | settings
    program, output = network.rlframe(network.all[0], endless, folder=folder / "work")
    wait_for_step(folder / "run", 3, output)
    return program, output


def wait_for_step(folder: Path, step: int, output: Path) -> None:
    """Returns once the metrics of a step are written."""
    deadline = time.monotonic() + 2 * DEADLINE_S
    while not any(line["step"] >= step and "train/loss" in line for line in metrics(folder)):
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


@pytest.mark.parametrize("death", [Machine.lose_power, Machine.lose_cable], ids=["power", "cable"])
def test_a_run_that_loses_a_node_ends_with_its_name_if_no_other_is_there(
    death: Callable[[Machine], None], tmp_path: Path
) -> None:
    with Machines(tmp_path / "network", NAMES) as network:
        network.start_ray([0, 1, 1])
        program, output = start_endless(network, tmp_path)
        death(network.all[2])
        assert program.wait(timeout=2 * DEADLINE_S) == 1
    said = output.read_text()
    found = [
        line for line in said.splitlines() if line.startswith("the Ray cluster has lost node-b (198.51.100.3), with")
    ]
    # The last words; with a cable Ray adds some of its own.
    assert found and "need 2 CPU devices, but the cluster has 1" in found[-1], said


def test_a_run_that_loses_a_node_goes_on_with_another(tmp_path: Path) -> None:
    with Machines(tmp_path / "network", (*NAMES, "node-c")) as network:
        network.start_ray([0, 1, 1, 1])
        program, output = start_endless(network, tmp_path)
        victim = next(each for each in network.all[1:] if runs_ranks(each))
        victim.lose_power()
        done = max(line["step"] for line in metrics(tmp_path / "run"))
        wait_for_step(tmp_path / "run", done + 3, output)
        program.terminate()
        assert program.wait(timeout=2 * DEADLINE_S) == 143
    said = output.read_text()
    assert f"the Ray cluster has lost {victim.name} ({victim.address})" in said
    assert "going on from the last checkpoint" in said and "resumed after step" in said
    steps = [line["step"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert steps == list(range(1, steps[-1] + 1))


def runs_ranks(machine: Machine) -> bool:
    """Whether a rank of the run is on the machine."""
    return any("MegatronWorker" in " ".join(process.cmdline()) for process in machine.processes())
