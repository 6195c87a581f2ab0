"""Machines of a cluster on this one: network namespaces with addresses, names and folders of their own.

Each machine is a process that waits in namespaces of its own; they end with it. Nothing of the network outside can be
reached from them.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PORT = 6379
NETWORK = "198.51.100"
"""A network for examples (RFC 5737), which no machine outside has."""
TOOLS = ("ip", "unshare", "nsenter")
START_S = 120.0
"""Seconds that Ray may take to start on a machine."""
WAITS = """
mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm && mount --bind "$2" /etc/hosts &&
hostname "$1" && ip link set lo up && echo ready && exec sleep 86400
"""


def refusal() -> str:
    """Returns why this machine cannot hold machines. Empty if it can."""
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "sh", "-c", "ip link add probe0 type bridge"],
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip()


class Machine:
    """One machine. Its programs see the files of this one, but for what is mounted over them."""

    def __init__(self, name: str, number: int, folder: Path):
        self.name, self.address = name, f"{NETWORK}.{number}"
        Path("/tmp/ray").mkdir(exist_ok=True)
        hosts = folder / f"{name}.hosts"
        # As Debian writes it: the name of a machine is an address that no other machine reaches.
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", WAITS, "sh", name, str(hosts)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.holder.stdout is not None and self.holder.stdout.readline() == "ready\n"
        self.programs: list[subprocess.Popen[str]] = []

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on the machine."""
        return ["nsenter", "--target", str(self.holder.pid), "--net", "--mount", "--uts", *command]

    def do(self, *command: str) -> None:
        """Runs a command on the machine."""
        subprocess.run(self.inside(command), check=True)

    def start(
        self, command: Sequence[str], *, output: Path, folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a program on the machine, in `folder`, which writes to `output`."""
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        variables = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
        with output.open("a") as file:
            program = subprocess.Popen(
                self.inside(["env", f"--chdir={folder}", *command]),
                env=variables, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        self.programs.append(program)
        return program

    def processes(self) -> list[psutil.Process]:
        """Every process on the machine."""
        mine = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/net") == mine:
                    found.append(process)
        return found

    def lose_power(self) -> None:
        """Kills every process on the machine at once, as seen from the others."""
        for signals in (signal.SIGSTOP, signal.SIGKILL):
            for process in self.processes():
                if process.pid != self.holder.pid:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signals)

    def lose_cable(self) -> None:
        """Leaves the network. Its processes go on."""
        self.do("ip", "link", "set", "net0", "down")

    def end(self) -> None:
        """Ends what is left of the machine."""
        left = self.processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=20)
        for program in self.programs:
            program.wait(timeout=20)
        self.holder.wait(timeout=20)
        assert self.holder.stdout is not None
        self.holder.stdout.close()


class Machines:
    """Machines on one network. The first is the bridge of the others, and the head of the Ray cluster."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self._stack = ExitStack()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.all: list[Machine] = []
        try:
            for number, name in enumerate(names, start=1):
                machine = Machine(name, number, folder)
                self._stack.callback(machine.end)
                self.all.append(machine)
            self._connect()
        except BaseException:
            self._stack.close()
            raise

    def _connect(self) -> None:
        head, *others = self.all
        head.do("ip", "link", "add", "net0", "type", "bridge")
        head.do("ip", "address", "add", f"{head.address}/24", "dev", "net0")
        head.do("ip", "link", "set", "net0", "up")
        for number, machine in enumerate(others):
            wire, there = f"wire{number}", str(machine.holder.pid)
            head.do("ip", "link", "add", wire, "type", "veth", "peer", "name", "net0", "netns", there)
            head.do("ip", "link", "set", wire, "master", "net0", "up")
            machine.do("ip", "address", "add", f"{machine.address}/24", "dev", "net0")
            machine.do("ip", "link", "set", "net0", "up")

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the cluster has: a token."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-of-the-tests"}

    @property
    def address(self) -> str:
        """The address of the Ray cluster."""
        return f"{self.all[0].address}:{PORT}"

    def start_ray(self, cpus: Sequence[int], *, gpus: Sequence[int] | None = None, options: Sequence[str] = ()) -> None:
        """Starts Ray on every machine with as many CPU slots and declared GPUs as given."""
        for number, (machine, count) in enumerate(zip(self.all, cpus, strict=True)):
            where = ["--head", f"--port={PORT}"] if number == 0 else [f"--address={self.address}"]
            if number == 0:
                where += ["--include-dashboard=false", *options]
            command = [
                str(Path(sys.executable).with_name("ray")), "start", *where, f"--node-ip-address={machine.address}",
                f"--num-cpus={count}", f"--num-gpus={gpus[number] if gpus else 0}", "--block",
                "--object-store-memory=80000000", "--disable-usage-stats",
            ]  # fmt: skip
            output = self.folder / f"{machine.name}.ray"
            program = machine.start(command, output=output, folder=Path("/"), environment=self.environment)
            deadline = time.monotonic() + START_S
            while "Ray runtime started" not in output.read_text():
                assert program.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.1)

    def rlframe(
        self, machine: Machine, settings: Mapping[str, object], *, folder: Path, config: str = "grpo_qwen3_moe",
        environment: Mapping[str, str] | None = None,
    ) -> tuple[subprocess.Popen[str], Path]:  # fmt: skip
        """Starts the main job on a machine, in `folder`. Returns it and the file that it writes to."""
        folder.mkdir(parents=True, exist_ok=True)
        overrides = [f"{key}={value}" for key, value in settings.items()]
        output = folder / "said"
        command = [sys.executable, "-m", "rlframe.main", "--config-name", config, *overrides]
        joined = {**self.environment, "RAY_ADDRESS": self.address, **(environment or {})}
        return machine.start(command, output=output, folder=folder, environment=joined), output
