"""The nodes of a joined Ray cluster: their names, their devices, and the device that `cluster.device` means there."""

import logging
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.watch.reach import refusal
from rlframe.utils.errors import ConfigError, NodeDied, RlframeError
from rlframe.utils.faults import Fault

T = TypeVar("T")
logger = logging.getLogger(__name__)
DEVICE_FILES = "nvidia[0-9]*"
"""Names of the GPUs of a machine under /dev."""
LOOK_S = 0.5
"""Seconds between two looks at the nodes."""
ANSWER_S = 60.0
"""Seconds that the nodes may take to answer a question. Each starts a process for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the cluster."""

    id: str
    """Ray's id."""
    host: str
    address: str
    num_gpus: float
    """Number of GPUs that its `ray start` declared."""
    num_cpus: float
    """Number of CPU cores that it declared."""
    alive: bool
    """Whether Ray has heard of it lately."""
    port: int
    """Port of its raylet."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


def known() -> list[Node]:
    """Returns the nodes that the cluster of this process has or had, sorted by address."""
    found = [
        Node(
            id=node["NodeID"],
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            num_gpus=node["Resources"].get("GPU", 0),
            num_cpus=node["Resources"].get("CPU", 0),
            alive=node["Alive"],
            port=node["NodeManagerPort"],
        )
        for node in ray.nodes()
    ]
    return sorted(found, key=lambda node: (node.address, node.id))


def alive() -> list[Node]:
    """Returns the living nodes of the cluster."""
    return [node for node in known() if node.alive]


def gone(ids: Collection[str]) -> list[Node]:
    """Returns those of the nodes that Ray has given up, or whose raylet accepts no connection. Ray itself takes
    several seconds to notice."""
    if not (others := set(ids) - {driver_id()}):
        return []
    used = [node for node in known() if node.id in others]
    return [node for node in used if not node.alive or refusal(f"{node.address}:{node.port}")]


@contextmanager
def noticing_deaths(ids: Collection[str]) -> Iterator[None]:
    """Raises NodeDied for an error inside the block if one of the nodes is gone, which then is the cause."""
    try:
        yield
    except RlframeError as error:
        lost = gone(ids)
        wait_until_given_up(lost)
        if lost and not isinstance(error, NodeDied):
            raise died(lost, said=str(error)) from error
        raise


def wait_until_given_up(lost: Sequence[Node]) -> None:
    """Waits until Ray knows that the nodes are gone, at most ANSWER_S. It would place workers there until then."""
    ids, deadline = {node.id for node in lost}, time.monotonic() + ANSWER_S
    while any(node.id in ids for node in alive()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def died(lost: Sequence[Node], *, said: str) -> NodeDied:
    """Returns the error for nodes that are gone.

    Args:
        said: what failed first because of that.
    """
    names = " and ".join(map(str, lost))
    return NodeDied(f"the Ray cluster has lost {names}, with the workers there: {said.partition(chr(10))[0]}")


def driver_id() -> str:
    """Returns Ray's id of the node that the driver runs on."""
    return ray.get_runtime_context().get_node_id()


def ask(nodes: Sequence[Node], question: Callable[..., T], *arguments: Any) -> dict[Node, T]:
    """Returns what `question(*arguments)` answers in a process of each node.

    Raises:
        ConfigError: a node did not answer, or cannot import rlframe.
    """
    task: Any = ray.remote(question)
    calls = {
        node: task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(*arguments)
        for node in nodes
    }
    answers, faults = {}, []
    for node, call in calls.items():
        try:
            answers[node] = ray.get(call, timeout=ANSWER_S)
        except RayError as error:
            faults.append(Fault("cluster.address", f"has the node {node}", why=unanswered(error)))
    if faults:
        raise ConfigError(faults)
    return answers


def unanswered(error: RayError) -> str:
    """Returns why a node did not answer, in one line."""
    text = str(error)
    if "No module named 'rlframe" in text:
        return "it cannot import rlframe; install the same rlframe in the environment of `ray start` on every node"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
    return f"it did not answer: {last}"


def settle(config: ClusterConfig, nodes: Sequence[Node]) -> Device:
    """Returns the hardware that `cluster.device` means on these nodes, and tells it.

    Raises:
        ConfigError: auto would train on a CPU although nodes have GPUs, which their `ray start` did not declare.
    """
    declared = ", ".join(f"{node}: {node.num_gpus:g}" for node in nodes)
    count = sum(node.num_gpus for node in nodes)
    where = f"the Ray cluster at {config.joins} declares {count:g} GPUs ({declared})"
    if config.device is Device.CPU and count:
        logger.warning("cluster.device=cpu: the run trains on CPUs, although %s", where)
    if config.device is not Device.AUTO:
        return config.device
    if count:
        logger.info("%s, so cluster.device=auto is cuda", where)
        return Device.CUDA
    if hidden := {node: names for node, names in ask(nodes, device_files).items() if names}:
        found = "; ".join(f"{node} has {', '.join(names)}" for node, names in hidden.items())
        raise ConfigError(
            [
                Fault(
                    "cluster.device",
                    "must be cpu or cuda",
                    got="auto",
                    why=f"{where}, and yet {found}",
                    hint="start those nodes with `ray start --num-gpus=N` and a driver that works, or set "
                    "cluster.device=cpu",
                )
            ]
        )
    logger.warning("%s, so cluster.device=auto is cpu; cluster.device=cuda refuses that", where)
    return Device.CPU


def device_files() -> list[str]:
    """Returns the GPUs of this machine by their files, whatever Ray and torch know of them. Runs as a Ray task."""
    return sorted(map(str, pathlib.Path("/dev").glob(DEVICE_FILES)))
