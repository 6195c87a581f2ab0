"""A cluster that is there already is joined, and left as it was."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.multiprocess.program import ONLINE, assert_equal_models, metrics, run

pytestmark = pytest.mark.thorough
CPUS = 2
# Ray asks for a token when this account happens to have one, and offers it only when told to.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
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
def head() -> Iterator[tuple[psutil.Process, str]]:
    """The process of a `ray start --head`, and the cluster's address."""
    port, agent, client = free_ports(3)
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
        f"--port={port}", f"--num-cpus={CPUS}",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", "--include-dashboard=false",
        "--disable-usage-stats", "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    process = psutil.Popen(
        command, env=os.environ | NO_TOKEN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        # It says so once the cluster answers.
        said = iter(process.stdout.readline, "")
        assert any("Ray runtime started" in line for line in said)
        yield process, f"127.0.0.1:{port}"
    finally:
        tree = [process, *process.children(recursive=True)]
        for each in tree:
            each.kill()
        psutil.wait_procs(tree, timeout=20)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def test_a_finished_run_started_again_in_a_cluster_only_exports(
    head: tuple[psutil.Process, str], whole: Path, tmp_path: Path
) -> None:
    process, address = head
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
