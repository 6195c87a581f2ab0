"""What is checked of a cluster before it is joined, on a driver that may have other devices than its nodes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlframe.cluster.config import Device
from rlframe.run import folder as output
from rlframe.run.check import OF_DEVICE, check_device, topics_of
from rlframe.run.check.context import device_of
from rlframe.run.check.machines import cluster, devices
from rlframe.run.config import Mode, RunConfig
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError
from tests.unit.run.check.test_check_states import model

JOINED = ["cluster.address=10.0.0.1:6379"]


@pytest.fixture(autouse=True)
def nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError("the driver's torch was asked for a device")

    monkeypatch.setattr("torch.cuda.is_available", asked)
    monkeypatch.setattr("torch.cuda.device_count", asked)


def run_of(*overrides: str) -> RunConfig:
    return load("grpo_qwen3_moe", ["model.random_init=true", *overrides])


def test_a_driver_without_gpus_may_join_nodes_that_have_them(torch_is_not_asked: None) -> None:
    for device in ("auto", "cuda", "cpu"):
        run = run_of(*JOINED, f"cluster.device={device}", "rollout=vllm")
        assert device_of(run) is Device(device)
        rules = [*OF_DEVICE, devices.devices, devices.packages, cluster.address]
        assert [str(fault) for rule in rules for fault in rule(run)] == []


def test_the_address_in_the_environment_counts_too(torch_is_not_asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert list(devices.devices(run_of("cluster.device=cuda"))) == []


def test_what_the_device_decides_is_checked_once_it_is_known(torch_is_not_asked: None) -> None:
    run = run_of(*JOINED, "cluster.device=auto", "train.kernels.attention=fused", "weight_sync.transport=cuda_ipc")
    check_device(run)
    run.cluster.device = Device.CUDA
    check_device(run)
    run.cluster.device = Device.CPU
    with pytest.raises(ConfigError) as caught:
        check_device(run)
    said = "\n".join(map(str, caught.value.faults))
    assert "train.kernels.attention has no effect on a CPU, got fused" in said
    assert "weight_sync.transport=cuda_ipc does not work with cluster.device=cpu: " in said


def test_what_an_engine_cannot_on_a_cpu_is_told_before_it_starts_there(
    torch_is_not_asked: None, tmp_path: Path
) -> None:
    run = run_of(*JOINED, "cluster.device=auto", "rollout=vllm", f"model.path={model(tmp_path, 'qwen3_next')}")
    run.cluster.device = Device.CUDA
    check_device(run)
    run.cluster.device = Device.CPU
    with pytest.raises(ConfigError, match="rollout.dtype must be bfloat16 for qwen3_next on a CPU"):
        check_device(run)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "ray://10.0.0.1:10001",
            "with Ray's client this process would not be part of the cluster; run the same command",
        ),
        ("http://10.0.0.1:8265", "that is where `ray job submit` sends jobs; submit the same command with"),
    ],
)
def test_an_address_for_another_purpose(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = cluster.address(run_of(f"cluster.address={address}"))
    assert str(fault).startswith(f"cluster.address must be auto or host:port, got {address}: {said}")
    monkeypatch.setenv("RAY_ADDRESS", address)
    (fault,) = cluster.address(run_of())
    assert str(fault).startswith("RAY_ADDRESS must be auto or host:port")


def test_an_output_in_the_folder_of_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    (fault,) = cluster.job_folder(run_of("output=outputs/run"))
    assert str(fault).startswith(f"output must not be in the working folder of a Ray job, got outputs/run: {job}/")
    assert list(cluster.job_folder(run_of(f"output={tmp_path}/run"))) == []


def test_variables_that_training_sets_are_refused() -> None:
    given = run_of("cluster.runtime_env.env_vars.CUDA_DEVICE_MAX_CONNECTIONS=8", "train.parallel=d1")
    assert list(cluster.variables(given)) == []
    (fault,) = cluster.variables(
        run_of("cluster.runtime_env.env_vars.CUBLAS_WORKSPACE_CONFIG=x", "train.deterministic=true")
    )
    assert str(fault).startswith("cluster.runtime_env.env_vars.CUBLAS_WORKSPACE_CONFIG is set by rlframe for each rank")


def test_what_the_job_gives_workers_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("cluster.runtime_env.env_vars.NCCL_DEBUG=INFO", "cluster.runtime_env.env_vars.HF_HOME=/shared")
    assert list(cluster.job_environment(run)) == []
    given = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "WARN", "OTHER": "1"}, "working_dir": "gcs://x.zip"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(given))
    (fault,) = cluster.job_environment(run)
    assert str(fault).startswith(
        "cluster.runtime_env.env_vars.NCCL_DEBUG is set by the runtime environment of this Ray job too; set it in one"
    )
    # Ray says so with an error of its own, in every mode.
    assert all(cluster.job_environment in topics_of(replace(run, mode=mode)) for mode in Mode)
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    assert list(cluster.job_environment(run)) == []


def test_secrets_of_workers_are_hidden_in_the_folder(tmp_path: Path) -> None:
    run = run_of(
        f"output={tmp_path}",
        "cluster.runtime_env.env_vars.HF_TOKEN=not-for-others",
        "cluster.runtime_env.env_vars.NCCL_DEBUG=INFO",
        "cluster.runtime_env.env_vars.NCCL_IB_DISABLE=1",
    )
    output.claim(run).close()
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["cluster"]["runtime_env"]["env_vars"]
    assert written == {"HF_TOKEN": "***", "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 1}


def test_nodes_are_asked_for_folders_and_packages_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    needs = cluster.needs(run_of(f"model.path={tmp_path}/model", "rollout=vllm"), tmp_path)
    assert needs.files["model.path"] == f"{tmp_path}/model/config.json"
    assert needs.packages == {"rollout.name": "vllm"}
    assert cluster.needs(run_of(), tmp_path).files == {}, "the embedded model comes with rlframe"


def test_nodes_are_not_asked_for_models_of_training_where_nothing_is_trained(tmp_path: Path) -> None:
    (tmp_path / "critic").mkdir()
    ppo = ("algorithm=ppo", f"critic.model.path={tmp_path}/critic")
    assert list(cluster.needs(run_of(*ppo), tmp_path).files) == ["critic.model.path"]
    for mode in ("evaluate", "generate"):
        assert cluster.needs(run_of(*ppo, f"mode={mode}"), tmp_path).files == {}
    assert cluster.needs(run_of(f"critic.model.path={tmp_path}/critic"), tmp_path).files == {}
