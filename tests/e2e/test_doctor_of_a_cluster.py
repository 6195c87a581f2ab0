"""The doctor asks every node of a real Ray cluster of two raylets, one of which differs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.later, pytest.mark.thorough]
LIMIT_S = 600


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster of two raylets on this machine. The second one has another variable of NCCL."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1, env_vars={"NCCL_IB_DISABLE": "1"})
        yield cluster.address
    finally:
        cluster.shutdown()


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlframe.tools.doctor", "--no-network", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_every_node_is_asked_and_the_one_that_differs_is_named(address: str, tmp_path: Path) -> None:
    done = doctor("--cluster", address, "--json", "--folder", str(tmp_path))
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    nodes = told["nodes"]
    assert len(nodes) == 2 and all(node["error"] == "" for node in nodes)
    # They have one clock, but for a millisecond in which the kernel may turn it.
    assert all(abs(node["skew_s"]) <= node["uncertainty_s"] + 1e-3 for node in nodes)
    (odd,) = [node["name"] for node in nodes if "NCCL_IB_DISABLE" in node["facts"]["environment"]]
    differing = [one for one in told["findings"] if "on 1 of the others" in one["what"]]
    assert [one["what"].split()[0] for one in differing] == ["NCCL_IB_DISABLE"]
    assert differing[0]["node"] in {node["name"] for node in nodes} and odd in {node["name"] for node in nodes}
    # A run joins the cluster that was asked, which is not unused.
    assert {node["facts"]["ray"]["address"] for node in nodes} == {address}
    # Both see the folder, and nothing stays in it.
    assert not [one for one in told["findings"] if "elsewhere" in one["what"]] and list(tmp_path.iterdir()) == []


def test_without_a_cluster_it_says_how_to_start_one() -> None:
    done = doctor("--cluster", "127.0.0.1:1")
    assert done.returncode == 2
    assert "no Ray cluster answers at '127.0.0.1:1'" in done.stderr and "ray start --head" in done.stderr
