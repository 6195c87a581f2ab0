"""Placement of roles on devices: one Ray placement group with one bundle per device."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlframe.cluster.roles import ENGINES, POLICY, Place, Topology
from rlframe.cluster.watch.activities import waiting
from rlframe.utils.errors import ConfigError

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""Seconds between two looks at the devices of a cluster that may grow."""
TAKEN = 0.9
"""Fraction of a device that its actors request from Ray together, each an equal share. The intended actors fit, and a
further one does not fit by accident."""
KEEP_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Variable that keeps Ray from narrowing an actor's CUDA_VISIBLE_DEVICES to its own GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A device of the placement group and its location."""

    index: int
    """Index in the placement group."""
    node: str
    """Ray's id of the node."""
    gpu: str | None
    """Name of the GPU in CUDA_VISIBLE_DEVICES on its node. None for a CPU slot."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices of one actor, all on one node."""

    group: PlacementGroup
    bundles: tuple[Bundle, ...]
    share: float = TAKEN
    """Fraction of its first device that the actor requests from Ray."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the actor's process."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Further parts of the runtime environment, as Ray calls it, of the actor's process."""

    def options(self) -> dict[str, object]:
        """Returns the arguments for `actor.options(...)` except the environment. The actor is placed on the first
        device."""
        first = self.bundles[0]
        return {
            "num_cpus": self.share,
            "num_gpus": 0 if first.gpu is None else self.share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=first.index
            ),
        }


@dataclass(frozen=True, slots=True)
class DriverNode:
    """The driver's node, for an actor that needs no device."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the actor's process."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """See Allocation."""

    def options(self) -> dict[str, object]:
        """Returns the arguments for `actor.options(...)` except the environment."""
        node = ray.get_runtime_context().get_node_id()
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


Dealt = dict[str, list[tuple[Bundle, ...]]]
"""The devices of each actor, by role."""


@dataclass(kw_only=True, slots=True)
class Placement:
    """The devices of a run."""

    slots: dict[str, list[Allocation]]
    """The slots of each role's actors, by role."""
    group: PlacementGroup

    @property
    def policy(self) -> list[Allocation]:
        """The slots of the training ranks."""
        return self.slots[POLICY]

    @property
    def engines(self) -> list[Allocation]:
        """The slots of the engines. Empty if nothing is sampled."""
        return self.slots.get(ENGINES, [])

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the nodes of the run's devices."""
        return {bundle.node for slots in self.slots.values() for each in slots for bundle in each.bundles}

    def release(self) -> None:
        """Gives the devices back. A joined cluster would otherwise keep them reserved."""
        remove_placement_group(self.group)


def reserve(topology: Topology, *, gpu: bool, timeout_s: float, growing: bool = False) -> Placement:
    """Reserves one bundle per device, close together, and assigns them to the roles.

    Args:
        growing: whether nodes may still join, and are waited for.

    Raises:
        ConfigError: the cluster has too few devices, they were not free within timeout_s seconds, or no node has enough
            for an engine.
    """
    count = topology.num_devices
    deadline = time.monotonic() + timeout_s
    kind = "GPU" if gpu else "CPU"
    wanted = f"{topology} need {count} {kind} devices"
    if growing:
        wait_for_devices(kind, count, wanted=wanted, timeout_s=timeout_s)
    available = ray.cluster_resources().get(kind, 0)
    if available < count:
        raise ConfigError([f"{wanted}, but the cluster has {available:g}; use a smaller layout or a larger cluster"])
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if gpu else {})
    group = placement_group([bundle] * count, strategy="PACK")
    if not group.wait(max(LOOK_S, deadline - time.monotonic())):
        remove_placement_group(group)
        raise ConfigError(
            [
                f"{wanted}, which were not free within {timeout_s:g} s "
                "(cluster.start_timeout_s); end other jobs or raise the limit"
            ]
        )
    bundles = locate(group, count, gpu=gpu, timeout_s=timeout_s)
    dealt = deal(bundles, topology)
    if dealt is None:
        remove_placement_group(group)
        largest = max(role.devices_per_actor for role in topology.roles)
        raise ConfigError(
            [
                f"{wanted}, and the {largest} devices of an engine must be on one node; the nodes gave "
                f"{', '.join(str(len(devices)) for devices in by_node(bundles))}. Make engines smaller, or use nodes "
                "on which whole engines fit"
            ]
        )
    shares = divide(dealt)
    slots = {role: [slot(group, own, bundles, shares) for own in devices] for role, devices in dealt.items()}
    return Placement(slots=slots, group=group)


def wait_for_devices(kind: str, count: int, *, wanted: str, timeout_s: float) -> None:
    """Waits until the cluster has so many devices, at most timeout_s seconds. Its nodes may start one by one."""
    deadline, told = time.monotonic() + timeout_s, -1.0
    while (available := ray.cluster_resources().get(kind, 0)) < count and time.monotonic() < deadline:
        if available != told:
            logger.warning(
                "%s, and the cluster has %g so far; waiting up to %g s for more nodes (cluster.start_timeout_s)",
                wanted, available, timeout_s,
            )  # fmt: skip
            told = available
        # Each look is progress to the watchdog, which knows nothing of nodes that are starting.
        with waiting("nodes of the cluster", role="driver", limit_s=timeout_s, start_limit_s=timeout_s):
            time.sleep(LOOK_S)


def locate(group: PlacementGroup, count: int, *, gpu: bool, timeout_s: float) -> list[Bundle]:
    """Returns the bundles of a reserved group, sorted by node and then by GPU number."""
    if not gpu:
        nodes: Mapping[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        bundles = [Bundle(index=index, node=nodes[index], gpu=None) for index in range(count)]
    else:
        probe = ray.remote(devices_here)
        places = ray.get(
            [
                probe.options(
                    num_cpus=TAKEN,
                    num_gpus=TAKEN,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                ).remote()
                for index in range(count)
            ],
            timeout=timeout_s,
        )
        bundles = [Bundle(index=index, node=node, gpu=gpu_id) for index, (node, gpu_id) in enumerate(places)]
    first = {bundle.node: bundle.index for bundle in reversed(bundles)}
    # GPU ids are usually numbers; UUIDs (a MIG device) keep the order of the bundles.
    return sorted(
        bundles,
        key=lambda each: (first[each.node], int(each.gpu) if each.gpu and each.gpu.isdigit() else 0, each.index),
    )


def devices_here() -> tuple[str, str]:
    """Returns Ray's id of the node and the GPU's name of the bundle that this task runs in. Runs as a Ray task."""
    context = ray.get_runtime_context()
    (gpu,) = context.get_accelerator_ids()["GPU"]
    return context.get_node_id(), gpu


def by_node(bundles: Iterable[Bundle]) -> list[list[Bundle]]:
    """Returns the bundles of each node, in their given order."""
    nodes: dict[str, list[Bundle]] = defaultdict(list)
    for bundle in bundles:
        nodes[bundle.node].append(bundle)
    return list(nodes.values())


def deal(bundles: Sequence[Bundle], topology: Topology) -> Dealt | None:
    """Returns the devices of each actor, by role: in the order of the roles if they fit so, or else the largest engines
    first. None if an engine would have to span nodes."""
    return deal_in_order(bundles, topology) or deal_largest_first(bundles, topology)


def deal_largest_first(bundles: Sequence[Bundle], topology: Topology) -> Dealt | None:
    """Deals to actors with several devices of their own first, from the last node on, and then to ranks, which may lie
    anywhere, what is left."""
    dealt: Dealt = {}
    large = [role for role in topology.roles if role.place is Place.OWN and role.devices_per_actor > 1]
    left = list(bundles)
    for role in sorted(large, key=lambda role: -role.devices_per_actor):
        places = within_nodes(left, role.devices_per_actor)[-(role.num_actors // role.actors_per_device) :]
        left = [bundle for bundle in left if not any(bundle in place for place in places)]
        dealt[role.name] = [each for each in places for _ in range(role.actors_per_device)]
        if len(dealt[role.name]) < role.num_actors:
            return None
    for every in (False, True):
        others = [role for role in topology.roles if role not in large and (role.place is Place.EVERY) == every]
        found = deal_in_order(bundles if every else left, Topology(tuple(others)))
        if found is None:
            return None
        dealt |= found
    return dealt


def deal_in_order(bundles: Sequence[Bundle], topology: Topology) -> Dealt | None:
    """Deals to each role the devices after those of the roles before it. Returns None if that is not possible."""
    dealt: Dealt = {}
    used = topology.num_shared
    for role in topology.roles:
        own = bundles
        if role.place is not Place.EVERY:
            begin = used if role.place is Place.OWN else 0
            own = bundles[begin : begin + role.num_devices]
        places = within_nodes(own, role.devices_per_actor)
        dealt[role.name] = [each for each in places for _ in range(role.actors_per_device)][: role.num_actors]
        if len(dealt[role.name]) < role.num_actors:
            return None
        used += role.num_devices if role.place is Place.OWN else 0
    return dealt


def within_nodes(bundles: Sequence[Bundle], size: int) -> list[tuple[Bundle, ...]]:
    """Returns groups of `size` devices of one node, as many as there are, in order."""
    return [
        tuple(devices[start : start + size])
        for devices in by_node(bundles)
        for start in range(0, len(devices) - size + 1, size)
    ]


def divide(dealt: Dealt) -> dict[int, float]:
    """Returns by bundle the fraction of its device that each of its actors requests."""
    users = Counter(bundle.index for devices in dealt.values() for own in devices for bundle in own)
    return {index: TAKEN / count for index, count in users.items()}


def slot(
    group: PlacementGroup, own: tuple[Bundle, ...], bundles: Iterable[Bundle], shares: Mapping[int, float]
) -> Allocation:
    """Returns the slot of an actor with the devices `own` among all `bundles` of the run."""
    return Allocation(group, own, shares[own[0].index], visible_devices(own, bundles))


def visible_devices(own: tuple[Bundle, ...], bundles: Iterable[Bundle]) -> dict[str, str]:
    """Returns the variables that show an actor all GPUs of the run on its node, its own first. Empty for CPU slots.

    The actor's own GPUs are cuda:0 and following. The others must be visible because CUDA IPC maps a peer's memory
    through a context on the peer's device; Ray alone would hide them.
    """
    gpus = [bundle.gpu for bundle in own if bundle.gpu is not None]
    if not gpus:
        return {}
    rest = [each.gpu for each in bundles if each.gpu is not None and each.node == own[0].node and each not in own]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*gpus, *rest]), KEEP_VISIBLE: "1"}
