"""A look at the nodes of a joined cluster before anything is loaded: what each lacks that the run needs there."""

import contextlib
import hashlib
import importlib.util
import logging
import pathlib
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import ray

import rlframe
from rlframe.cluster.joined import nodes
from rlframe.cluster.joined.needs import Needs
from rlframe.cluster.joined.nodes import Node
from rlframe.utils.errors import ConfigError, OutputError
from rlframe.utils.faults import Fault
from rlframe.utils.files.whole import write_whole

logger = logging.getLogger(__name__)
PREFIX = ".seen-from-all-nodes-"
PATIENCE_S = 10.0
"""Seconds that a network file system may take to show a new file on another node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The answer of a node."""

    failure: str
    """Reason why the node cannot use the run's folder. Empty if it can."""
    missing: tuple[str, ...]
    """Keys of files and packages that it lacks."""
    digest: str
    """Digest of its copy of rlframe."""


def inspect(needs: Needs, used: Collection[str]) -> None:
    """Refuses nodes that cannot do their part, and warns of those whose rlframe is another one.

    Args:
        used: Ray's ids of the nodes on which the run has workers.

    Raises:
        ConfigError: every fault of every node.
    """
    here = nodes.driver_id()
    others = [node for node in nodes.alive() if node.id in used and node.id != here]
    if not others:
        return
    with probe(needs.output) as word:
        reports = nodes.ask(others, look, needs, word)
        faults = [fault for node, report in reports.items() for fault in faults_of(node, report, needs)]
        faults += [unwritten(node, needs) for node, report in reports.items() if not seen(needs, word, node, report)]
    if faults:
        raise ConfigError(faults)
    ours = digest()
    for node in [node for node, report in reports.items() if report.digest != ours]:
        logger.warning("node %s has another rlframe than the driver; install the same on every node", node)


@contextlib.contextmanager
def probe(folder: pathlib.Path) -> Iterator[str]:
    """Writes a file of a new name into `folder`, yields the name, and removes it with those of the nodes."""
    word = PREFIX + secrets.token_hex(8)
    write_whole(folder / word, word.encode())
    try:
        yield word
    finally:
        for file in folder.glob(f"{word}*"):
            file.unlink(missing_ok=True)


def look(needs: Needs, word: str) -> Report:
    """Looks for what the run needs on this node. Runs as a Ray task."""
    missing = [key for key, file in needs.files.items() if not pathlib.Path(file).is_file()]
    missing += [key for key, package in needs.packages.items() if importlib.util.find_spec(package) is None]
    failure = ""
    if not appears(needs.output / word):
        failure = "the files that the driver writes there do not appear"
    else:
        try:
            write_whole(answer(needs.output, word, ray.get_runtime_context().get_node_id()), word.encode())
        except OutputError as error:
            failure = f"the node cannot write there: {error}"
    return Report(failure=failure, missing=tuple(missing), digest=digest())


def answer(folder: pathlib.Path, word: str, node_id: str) -> pathlib.Path:
    """Returns the file with which a node answers the probe `word`."""
    return folder / f"{word}-{node_id}"


def appears(file: pathlib.Path) -> bool:
    """Returns whether the file can be read, now or soon."""
    deadline = time.monotonic() + PATIENCE_S
    while not file.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def seen(needs: Needs, word: str, node: Node, report: Report) -> bool:
    """Returns whether the driver sees what the node has written, or knows already why not."""
    return bool(report.failure) or appears(answer(needs.output, word, node.id))


def faults_of(node: Node, report: Report, needs: Needs) -> Iterator[Fault]:
    """Yields what a node lacks."""
    if report.failure:
        yield Fault(
            "output",
            f"must be a folder that every node shares: on node {node}",
            why=f"{needs.output}: {report.failure}",
            hint="set output to a folder on a file system that all nodes mount at the same path",
        )
    for key in report.missing:
        if key in needs.packages:
            package = needs.packages[key]
            yield Fault(key, f"needs the package {package} on node {node}", hint="install it in its environment")
        else:
            yield Fault(
                key,
                f"must exist on every node: node {node} has no {needs.files[key]}",
                hint="put it on a file system that all nodes mount at the same path",
            )


def unwritten(node: Node, needs: Needs) -> Fault:
    """Returns the fault of a node whose files the driver does not see."""
    return Fault(
        "output",
        f"must be a folder that every node shares: what node {node} writes to {needs.output} does not appear here",
        hint="set output to a folder on a file system that all nodes mount at the same path",
    )


def digest() -> str:
    """Returns a digest of the source files of this process's rlframe."""
    root = pathlib.Path(rlframe.__file__).parent
    whole = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        whole.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()
