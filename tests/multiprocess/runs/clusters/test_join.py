"""A cluster that is there already is joined, and left as it was."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.multiprocess.program import LEARNING, ONLINE, Program, assert_equal_models, metrics, run
from tests.multiprocess.ray_cluster import NO_TOKEN, head

pytestmark = pytest.mark.thorough
CPUS = 2
FREE_CPUS = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
deadline = time.monotonic() + 30
while ray.available_resources().get("CPU") != float(sys.argv[2]) and time.monotonic() < deadline:
    time.sleep(0.2)
print("free:", ray.available_resources().get("CPU"))
"""
"""Waits until a cluster has its CPUs back."""


@pytest.fixture
def cluster() -> Iterator[tuple[psutil.Process, str]]:
    """The process of a `ray start --head`, and the cluster's address."""
    with head(cpus=CPUS) as found:
        yield found


def test_a_finished_run_started_again_in_a_cluster_only_exports(
    cluster: tuple[psutil.Process, str], whole: Path, tmp_path: Path
) -> None:
    process, address = cluster
    folder = tmp_path / "run"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("model"))
    run(folder, ONLINE, environment={"RAY_ADDRESS": address, **NO_TOKEN})
    assert metrics(folder) == metrics(whole)
    assert_equal_models(folder, whole)
    said = (tmp_path / "run.stderr").read_text()
    assert f"the Ray cluster at {address} requires no token, so anyone who reaches its ports can run" in said
    assert process.is_running()
    asked = subprocess.run(
        [sys.executable, "-c", FREE_CPUS, address, str(CPUS)],
        env=os.environ | NO_TOKEN, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"free: {float(CPUS)}" in asked.stdout


def test_workers_start_in_a_copied_folder_with_the_variables_of_the_run(
    cluster: tuple[psutil.Process, str], tmp_path: Path
) -> None:
    _, address = cluster
    work = tmp_path / "work"
    work.mkdir()
    (work / "helper.py").write_text("VALUE = 1.0\n")
    environment = {
        "cluster.runtime_env.working_dir": work,
        "cluster.runtime_env.env_vars.TORCH_SHOW_CPP_STACKTRACES": 1,
    }
    run(tmp_path / "run", LEARNING | {"steps": 1} | environment, environment={"RAY_ADDRESS": address, **NO_TOKEN})
    assert len(metrics(tmp_path / "run")) >= 1


def test_gpus_that_are_declared_on_a_machine_without_are_said_by_the_rank(tmp_path: Path) -> None:
    with head(cpus=2, gpus=1) as (_, address):
        small = LEARNING | {"steps": 1, "rollout.num_engines": 1, "train.parallel": "d1", "cluster.device": "auto"}
        environment = {"RAY_ADDRESS": address, **NO_TOKEN}
        with Program(tmp_path / "run", small, environment=environment) as program:
            assert program.finish() == 2, program.errors()
            said = program.errors()
    assert "so cluster.device=auto is cuda" in said
    assert "where torch finds no CUDA device, got cuda: torch" in said and "Traceback" not in said
