"""A run that joins a cluster: which address, which device, what its workers are given."""

import os
import socket
from pathlib import Path

import pytest
from ray._private import worker

from rlframe.cluster import runtime
from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.joined import inspection, job, nodes
from rlframe.cluster.joined.inspection import Report
from rlframe.cluster.joined.needs import Needs
from rlframe.cluster.joined.nodes import Node
from rlframe.cluster.network import GLOO_INTERFACE, interface_of, is_here, use_address
from rlframe.cluster.runtime_env import OURS, RuntimeEnvConfig
from rlframe.cluster.watch.flight import RING
from rlframe.utils.errors import ConfigError, SettingError


@pytest.mark.parametrize(
    ("setting", "variable", "joins"),
    [
        (None, None, None),
        (None, "", None),
        ("auto", None, "auto"),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
        # A Ray of the run's own, although the environment names a cluster.
        ("local", "10.0.0.1:6379", None),
    ],
)
def test_the_address_of_the_cluster(
    setting: str | None, variable: str | None, joins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert ClusterConfig(address=setting).joins == joins


def test_a_ray_that_does_not_start_in_its_time_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Ray 2.60 does after 30 s.
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(runtime.ray, "init", init)
    said = r"cluster\.address: Ray did not start on this machine \(The .* during startup\.\); look with `top` .*=auto$"
    with pytest.raises(ConfigError, match=said), runtime.running(ClusterConfig(address="local"), num_devices=1):
        pass


@pytest.mark.parametrize("name", ["l" * 120, "a file/folder"])
def test_a_temporary_folder_that_ray_cannot_use_is_said_with_what_to_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    said = rf"RAY_TMPDIR: Ray cannot keep its files and sockets in {tmp_path / name} \(.*\); set RAY_TMPDIR to a folder"
    with pytest.raises(ConfigError, match=said), runtime.running(ClusterConfig(address="local"), num_devices=1):
        pass


def test_ray_does_not_say_of_workers_that_a_run_ends_that_they_died(capsys: pytest.CaptureFixture[str]) -> None:
    # What Ray 2.60 prints in its thread, at times, when `ray.kill` ends an actor.
    died = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    with runtime.without_deaths():
        for line in (died, "the node runs low on memory"):
            worker.print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    said = capsys.readouterr().out
    assert "low on memory" in said and "died" not in said


def node(name: str, *, num_gpus: float) -> Node:
    """A node of that name."""
    return Node(id=name, host=name, address="10.0.0.1", num_gpus=num_gpus, num_cpus=4, alive=True, port=1)


def test_auto_is_cuda_where_any_node_declares_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    config = ClusterConfig(address="auto")
    with caplog.at_level("INFO"):
        found = nodes.settle(config, [node("head", num_gpus=0), node("worker", num_gpus=8)])
    assert found is Device.CUDA
    assert "declares 8 GPUs (head (10.0.0.1): 0, worker (10.0.0.1): 8), so cluster.device=auto is cuda" in caplog.text


def test_a_cpu_on_a_cluster_with_gpus_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = ClusterConfig(address="auto", device=Device.CPU)
    assert nodes.settle(config, [node("worker", num_gpus=8)]) is Device.CPU
    assert "cluster.device=cpu: the run trains on CPUs, although the Ray cluster at auto declares 8 GPUs" in caplog.text


@pytest.mark.parametrize("files", [[], ["/dev/nvidia0"]])
def test_auto_without_declared_gpus_is_told_and_refused_where_there_are_some(
    files: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "ask", lambda asked, question: {each: files for each in asked})
    config, there = ClusterConfig(address="auto"), [node("worker", num_gpus=0)]
    if not files:
        assert nodes.settle(config, there) is Device.CPU
        assert "so cluster.device=auto is cpu; cluster.device=cuda refuses that" in caplog.text
        return
    with pytest.raises(ConfigError, match="cluster.device must be cpu or cuda, got auto: .* has /dev/nvidia0; start"):
        nodes.settle(config, there)


def test_what_a_node_lacks_is_said_with_its_name(tmp_path: Path) -> None:
    needs = Needs(output=tmp_path, files={"model.path": "/models/m/config.json"}, packages={"rollout.name": "vllm"})
    report = Report(failure="it is read-only", missing=("model.path", "rollout.name"), digest="")
    assert [str(fault) for fault in inspection.faults_of(node("gpu-1", num_gpus=8), report, needs)] == [
        f"output must be a folder that every node shares: on node gpu-1 (10.0.0.1): {tmp_path}: it is read-only; set "
        "output to a folder on a file system that all nodes mount at the same path",
        "model.path must exist on every node: node gpu-1 (10.0.0.1) has no /models/m/config.json; put it on a file "
        "system that all nodes mount at the same path",
        "rollout.name needs the package vllm on node gpu-1 (10.0.0.1); install it in its environment",
    ]


def test_a_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    with inspection.probe(tmp_path) as word:
        (tmp_path / f"{word}-answer").write_text(word)
        assert inspection.appears(tmp_path / word)
    assert list(tmp_path.iterdir()) == []


def test_variables_of_workers_are_text_and_folders_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given").mkdir()
    monkeypatch.chdir(tmp_path)
    given = RuntimeEnvConfig(env_vars={"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 1}, working_dir="given", pip=["sympy"])
    assert given.for_ray() == {
        "env_vars": {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"},
        "working_dir": f"{tmp_path}/given",
        "pip": ["sympy"],
    }
    assert RuntimeEnvConfig().for_ray() == {}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (
            {"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}},
            "env_vars.CUDA_VISIBLE_DEVICES is set by rlframe for each worker",
        ),
        ({"env_vars": {"A B": "0"}}, "env_vars must have names of letters, digits and _, got A B"),
        ({"working_dir": "nowhere"}, "working_dir must be a folder of this machine, got nowhere"),
        ({"pip": ["sympy >= =1"]}, "pip must list requirements such as sympy==1.14, got sympy >= =1"),
    ],
)
def test_what_workers_cannot_be_given(settings: dict[str, object], rule: str) -> None:
    with pytest.raises(SettingError) as caught:
        RuntimeEnvConfig(**settings)
    assert str(caught.value).startswith(rule)


def test_every_variable_that_workers_start_with_is_refused() -> None:
    assert RING.keys() <= OURS.keys()


def test_gloo_takes_the_interface_of_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.77") is None
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")
    use_address("127.0.0.1")
    assert os.environ[GLOO_INTERFACE] == "eth7"


def test_a_machine_of_the_same_name_is_another_one() -> None:
    assert is_here(socket.gethostname(), "127.0.0.1")
    assert not is_here(socket.gethostname(), "203.0.113.9") and not is_here("gpu-1", "127.0.0.1")


def test_a_worker_elsewhere_is_named_with_its_address() -> None:
    here = {"role": "policy", "rank": 1, "node_id": "", "host": "gpu-1", "pid": 7, "log": ""}
    assert str(WorkerInfo(address="10.0.0.2", **here)) == "policy rank 1 (pid 7 on gpu-1, 10.0.0.2)"
    assert str(WorkerInfo(address="127.0.0.1", **here)) == "policy rank 1 (pid 7 on gpu-1)"


@pytest.mark.parametrize(
    ("variables", "on_signal_s", "said"),
    [
        ({}, 300, ""),
        ({job.CONFIG: "{}"}, 300, "kills this run 3 s after its SIGTERM"),
        ({job.CONFIG: "{}", job.STOP_WAIT: "60"}, 300, "kills this run 60 s after its SIGTERM"),
        ({job.CONFIG: "{}", job.STOP_WAIT: "600"}, 300, ""),
        ({job.CONFIG: "{}"}, 0, ""),
    ],
)
def test_a_job_that_cannot_save_in_time_is_told(
    variables: dict[str, str], on_signal_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (job.CONFIG, job.STOP_WAIT):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said in (found := job.caution(on_signal_s) or "") and bool(said) == bool(found)
