"""The program: `python -m rlframe.tools.doctor [--json] [--folder FOLDER] [--cluster [ADDRESS]]`."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlframe.tools.doctor import gather
from rlframe.tools.doctor.checks import findings
from rlframe.tools.doctor.cluster import NoCluster, ask
from rlframe.tools.doctor.facts import Facts, Finding
from rlframe.tools.doctor.nodes import Node, differences
from rlframe.utils.arguments import Parser

ABOUT = "Reports what this machine, or every node of a Ray cluster, offers to rlframe, and the commands that mend it."


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints facts and findings. Returns 1 if runs would fail, 2 if no cluster answers, else 0."""
    parser = Parser(prog="python -m rlframe.tools.doctor", description=ABOUT)
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.add_argument("--folder", default="outputs", help="folder to which runs write (outputs)")
    parser.add_argument("--no-network", action="store_true", help="do not connect to the hub")
    parser.add_argument(
        "--cluster", nargs="?", const="auto", metavar="ADDRESS", help="ask every node of a Ray cluster (auto)"
    )
    options = parser.parse_args(arguments)
    mark = ""
    try:
        if options.cluster:
            nodes, mark = ask(options.cluster, options.folder, ask_hub=not options.no_network)
        else:
            nodes = [Node(name="", facts=gather.facts(options.folder, ask_hub=not options.no_network))]
    except NoCluster as error:
        hint = "start one with `ray start --head`, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its token"
        print(f"{error}; {hint}", file=sys.stderr)
        return 2
    found = [replace(one, node=node.name) for node in nodes if node.facts is not None for one in findings(node.facts)]
    found = together(found) + list(differences(nodes, mark=mark))
    print(json.dumps(as_json(nodes, found), indent=2) if options.json else "\n".join(lines(nodes, found)))
    return int(any(one.is_problem for one in found))


def together(found: list[Finding]) -> list[Finding]:
    """Returns findings that several nodes have as one, which names them all."""
    names: dict[Finding, list[str]] = {}
    for one in found:
        names.setdefault(replace(one, node=""), []).append(one.node)
    return [replace(one, node=", ".join(filter(None, those))) for one, those in names.items()]


def as_json(nodes: list[Node], found: list[Finding]) -> dict[str, Any]:
    """Returns facts by node, and findings."""
    return {"nodes": [asdict(node) for node in nodes], "findings": [asdict(one) for one in found]}


def lines(nodes: list[Node], found: list[Finding]) -> Iterator[str]:
    """Yields a line for each fact, then two for each finding: what it is, and the command that mends it."""
    for node in nodes:
        if node.name:
            yield f"{'node':>18}  {node.name}"
        if node.facts is not None:
            yield from (f"{name:>18}  {fact}" for name, fact in told(node.facts))
    for one in sorted(found, key=lambda one: not one.is_problem):
        where = f"{one.node}: " if one.node else ""
        yield f"{'problem' if one.is_problem else 'warning':>18}  {where}{one.what}"
        yield from (f"{'':>18}  $ {command}" for command in one.mend.splitlines())
    problems = sum(one.is_problem for one in found)
    yield f"{'':>18}  {problems} problems, {len(found) - problems} warnings"


def told(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each fact."""
    system, gpus, disk, hub = facts.system, facts.gpus, facts.disk, facts.hub
    yield "python", f"{system.python} on {system.platform}"
    yield from facts.packages.items()
    yield "driver", gpus.driver or "none"
    yield "torch's CUDA", gpus.torch_cuda or "none"
    devices = [f"{device.name} {device.memory_gib:.0f} GiB" for device in gpus.devices]
    yield "GPUs", f"{len(devices)}: {', '.join(devices)}" if devices else "none"
    yield "headers", ", ".join(gpus.headers) or "none"
    yield "cores", str(system.cores)
    yield "memory", f"{system.memory_gib:g} GiB, {system.shm_gib:g} GiB of it in /dev/shm"
    limits = [f"{name} {limit.soft or 'unlimited'}" for name, limit in system.limits.items()]
    yield "limits", ", ".join(limits)
    speed = f"{disk.mib_per_s:g} MiB/s" if disk.mib_per_s is not None else "cannot be written"
    yield "disk", f"{disk.folder}: {disk.free_gib:g} GiB free, {speed}"
    reach = "offline" if hub.is_offline else hub.error or ("reached" if hub.is_asked else "not asked")
    yield "hub", f"{hub.endpoint}: {reach}; cache {hub.cache}"
    yield "ray", f"address {facts.ray.address or 'not set'}, auth mode {facts.ray.auth_mode or 'not set'}"
