"""Asks every node of a Ray cluster for its facts, each by a task that is pinned to it."""

import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlframe.tools.doctor import gather
from rlframe.tools.doctor.nodes import Node

TIMEOUT_S = 120.0
"""Time in which a node must answer, the start of a worker included."""
CLOCK_QUESTIONS = 5
"""Number of times that a clock is asked for; the quickest answer counts."""


class NoCluster(Exception):
    """No Ray cluster answers."""


def ask(address: str, folder: str, *, ask_hub: bool = True) -> tuple[list[Node], str]:
    """Returns the nodes of a cluster, and the name of a file that was put into `folder` while they were asked.

    Raises:
        NoCluster: no cluster answers at the address.
    """
    import ray  # noqa: PLC0415 - everything else does without

    host, colon, port = address.rpartition(":")
    # Ray would wait for minutes.
    if colon and port.isdigit() and (reason := gather.refusal(host.rpartition("/")[2], int(port))):
        raise NoCluster(f"no Ray cluster answers at {address!r}: {reason}")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise NoCluster(f"no Ray cluster answers at {address!r}: {error!s:.300}") from error
    try:
        with _mark(folder) as mark:
            return _nodes(ray, folder, ask_hub=ask_hub), mark
    finally:
        ray.shutdown()


def _nodes(ray: Any, folder: str, *, ask_hub: bool) -> list[Node]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    alive = sorted((one for one in ray.nodes() if one["Alive"]), key=_name)
    actor = ray.remote(num_cpus=0)(Asked)
    asked = [
        actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(one["NodeID"], soft=False)).remote()
        for one in alive
    ]
    answers = [one.facts.remote(folder, ask_hub) for one in asked]
    deadline = time.monotonic() + TIMEOUT_S
    nodes = []
    for one, actor_of_it, answer in zip(alive, asked, answers, strict=True):
        try:
            facts = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
            skew_s, uncertainty_s = _skew(ray, actor_of_it)
        except ray.exceptions.RayError as error:
            nodes.append(Node(name=_name(one), error=_sentence(error)))
        else:
            # Its variables name no cluster, and it belongs to the one that is asked.
            facts = replace(facts, ray=replace(facts.ray, address=ray.get_runtime_context().gcs_address))
            nodes.append(Node(name=_name(one), facts=facts, skew_s=skew_s, uncertainty_s=uncertainty_s))
    return nodes


class Asked:
    """Runs on a node."""

    def facts(self, folder: str, ask_hub: bool) -> Any:
        """Returns the facts of the node."""
        return gather.facts(folder, ask_hub=ask_hub)

    def time(self) -> float:
        """Returns the time of the node's clock."""
        return time.time()


def _skew(ray: Any, actor: Any) -> tuple[float, float]:
    """Returns by how much a node's clock is ahead, and half of the time of the quickest question."""
    found = []
    for _ in range(CLOCK_QUESTIONS):
        before = time.time()
        there = ray.get(actor.time.remote(), timeout=TIMEOUT_S)
        half = (time.time() - before) / 2
        found.append((half, there - before - half))
    uncertainty_s, skew_s = min(found)
    return skew_s, uncertainty_s


def _name(node: dict[str, Any]) -> str:
    """Returns a name that no two nodes share, not even two of one machine."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__


@contextmanager
def _mark(folder: str) -> Iterator[str]:
    """Puts a file into a folder, if that can be written. Yields its name, or an empty text."""
    place = Path(folder).expanduser().absolute()
    while not place.exists():
        place = place.parent
    name = f".rlframe-doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        (place / name).touch()
    except OSError:
        yield ""
        return
    try:
        yield name
    finally:
        with suppress(OSError):
            (place / name).unlink()
