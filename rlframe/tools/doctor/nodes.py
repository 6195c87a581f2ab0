"""Compares the nodes of a cluster: what differs, on which of them, and by how much their clocks do."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlframe.tools.doctor.facts import Facts, Finding, warning
from rlframe.tools.doctor.stack import package

MOST_SKEW_S = 1.0
"""Greatest difference of clocks, beyond what the network makes uncertain."""
MUST_AGREE = (
    "rlframe",
    "torch",
    "megatron-core",
    "ray",
    "transformers",
    "transformer-engine",
    "vllm",
    "sglang",
    "nccl",
)
"""Packages whose releases must be the same on all nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node, and what is known of it."""

    name: str
    facts: Facts | None = None
    """None if it did not answer."""
    error: str = ""
    """Why it did not."""
    skew_s: float = 0.0
    """By how much its clock is ahead of the clock of the machine that asks."""
    uncertainty_s: float = 0.0
    """Half of the time that the question took."""


def differences(nodes: list[Node], *, mark: str = "") -> Iterator[Finding]:
    """Yields what nodes must mend to be alike.

    Args:
        mark: name of a file that was written to the folder on the machine that asks, to see who shares it.
    """
    for node in nodes:
        if node.facts is None:
            mend = "ray stop && ray start --address=HEAD:6379  # there; see /tmp/ray/session_latest/logs"
            yield Finding(what=f"it does not answer: {node.error}", mend=mend, node=node.name)
    known = {node.name: node.facts for node in nodes if node.facts is not None}
    for name in MUST_AGREE:
        yield from _odd(
            known,
            name,
            lambda facts, name=name: facts.packages.get(name, "missing"),
            lambda usual, name=name: f'pip install "{_requirement(name, usual)}"',
        )
    minor = _minor_python
    yield from _odd(known, "python", minor, lambda usual: f"uv venv --python {usual}")
    yield from _odd(known, "the driver", lambda facts: facts.gpus.driver or "none", _install_driver)
    yield from _odd(known, "the set of GPUs", _devices, lambda _: "ray stop", is_problem=False)
    for name in sorted({name for facts in known.values() for name in facts.environment}):
        yield from _odd(
            known,
            name,
            lambda facts, name=name: facts.environment.get(name, "not set"),
            lambda usual, name=name: f"unset {name}" if usual == "not set" else f"export {name}={usual}",
        )
    yield from _skewed(nodes)
    yield from _apart(known, mark)


def _odd(
    known: Mapping[str, Facts],
    what: str,
    value_of: Callable[[Facts], str],
    mend: Callable[[str], str],
    *,
    is_problem: bool = True,
) -> Iterator[Finding]:
    """Finds nodes whose value is not the most frequent one; among equally frequent ones, the first node's."""
    values = {name: value_of(facts) for name, facts in known.items()}
    if len(set(values.values())) < 2:
        return
    usual, count = Counter(values.values()).most_common(1)[0]
    for name, value in values.items():
        if value != usual:
            yield Finding(
                what=f"{what} is {value}, and {usual} on {count} of the others",
                mend=f"{mend(usual)}  # there, before `ray start`",
                is_problem=is_problem,
                node=name,
            )


def _skewed(nodes: list[Node]) -> Iterator[Finding]:
    for node in nodes:
        if node.facts is not None and abs(node.skew_s) - node.uncertainty_s > MOST_SKEW_S:
            direction = "ahead" if node.skew_s > 0 else "behind"
            yield Finding(
                what=f"its clock is {abs(node.skew_s):.1f} s {direction}, give or take {node.uncertainty_s:.1f} s",
                mend="sudo timedatectl set-ntp true && sudo chronyc makestep  # there",
                node=node.name,
            )


def _apart(known: Mapping[str, Facts], mark: str) -> Iterator[Finding]:
    """Finds nodes that do not share the folder."""
    for name, facts in known.items():
        if mark and mark not in facts.disk.marks:
            yield warning(
                f"what is written to {facts.disk.folder} elsewhere is not seen there: checkpoints of several nodes "
                "need a folder that all of them share",
                "python -m rlframe.tools.doctor --cluster --folder FOLDER  # of a shared disk, then output=FOLDER",
                node=name,
            )


def _requirement(name: str, usual: str) -> str:
    parts = package(name).parts
    return f"{name}{f'[{parts}]' if parts else ''}=={usual}"


def _install_driver(usual: str) -> str:
    return f"sudo apt-get install --yes nvidia-driver-{usual.partition('.')[0]}-server={usual}*"


def _minor_python(facts: Facts) -> str:
    return ".".join(facts.system.python.split(".")[:2])


def _devices(facts: Facts) -> str:
    names: Any = Counter(device.name for device in facts.gpus.devices)
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items())) or "none"
