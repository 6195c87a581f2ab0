"""A Ray cluster of this machine that is not a run's own: `ray start --head`, as a user starts it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

# Ray asks for a token when this account happens to have one, and offers it only when told to.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
START_S = 180.0


@contextmanager
def head(
    *, cpus: int, gpus: int = 0, options: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[tuple[psutil.Process, str]]:
    """The process of a `ray start --head` with so many CPU slots and declared GPUs, and the cluster's address."""
    port, agent, client = free_ports(3)
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
        f"--port={port}", f"--num-cpus={cpus}", f"--num-gpus={gpus}",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}",
        "--disable-usage-stats", "--node-ip-address=127.0.0.1", *(options or ["--include-dashboard=false"]),
    ]  # fmt: skip
    variables = os.environ | NO_TOKEN | (environment or {})
    process = psutil.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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


def wait_until_open(port: int) -> None:
    """Returns once something listens on the port of this machine."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on {port}"
            time.sleep(0.2)
