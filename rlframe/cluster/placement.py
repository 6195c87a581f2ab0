"""Which devices each role gets: one Ray placement group, one bundle per device."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlframe.cluster.roles import ENGINES, POLICY, Place, Topology
from rlframe.utils.errors import ConfigError

TAKEN = 0.9
"""Part of a device that its actors ask Ray for together, each for as much as the others: those that are meant to be on
it fit, one more does not by accident."""
KEEP_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Keeps Ray from narrowing an actor's CUDA_VISIBLE_DEVICES to its own GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """One device of the placement group, and where it is."""

    index: int
    """Within the placement group."""
    node: str
    """Ray's id of the node."""
    gpu: str | None
    """What CUDA_VISIBLE_DEVICES calls the GPU on its node; None for a CPU slot."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices of one actor, all on one node."""

    group: PlacementGroup
    bundles: tuple[Bundle, ...]
    share: float = TAKEN
    """Part of its first device that the actor asks Ray for."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables the actor's process starts with."""

    def options(self) -> dict[str, object]:
        """Arguments for `actor.options(...)`, its environment aside. The actor itself sits on the first device."""
        first = self.bundles[0]
        return {
            "num_cpus": self.share,
            "num_gpus": 0 if first.gpu is None else self.share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=first.index
            ),
        }


Dealt = dict[str, list[tuple[Bundle, ...]]]
"""By role, the devices of each of its actors."""


@dataclass(kw_only=True, slots=True)
class Placement:
    """The devices of a run."""

    slots: dict[str, list[Allocation]]
    """By role, one for each of its actors."""
    group: PlacementGroup

    @property
    def policy(self) -> list[Allocation]:
        """One per training rank."""
        return self.slots[POLICY]

    @property
    def engines(self) -> list[Allocation]:
        """One per engine; none where nothing is sampled."""
        return self.slots.get(ENGINES, [])

    def release(self) -> None:
        """Give the devices back; a joined cluster keeps them reserved otherwise."""
        remove_placement_group(self.group)


def reserve(topology: Topology, *, gpu: bool, timeout_s: float) -> Placement:
    """Reserves one bundle per device, close together, and deals them to the roles.

    Raises:
        ConfigError: the cluster has not that many devices, they were not free within timeout_s seconds, or no node has
            room for all devices of an engine.
    """
    count = topology.num_devices
    wanted = f"{topology} need {count} {'GPU' if gpu else 'CPU'} devices"
    available = ray.cluster_resources().get("GPU" if gpu else "CPU", 0)
    if available < count:
        raise ConfigError([f"{wanted}, the cluster has {available:g}; make the layout smaller or the cluster larger"])
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if gpu else {})
    group = placement_group([bundle] * count, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise ConfigError([f"{wanted}; they were not free within {timeout_s:g} s (cluster.start_timeout_s)"])
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


def locate(group: PlacementGroup, count: int, *, gpu: bool, timeout_s: float) -> list[Bundle]:
    """The bundles of a reserved group, side by side with those of the same node, on each by GPU number."""
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
    # GPU ids are numbers as a rule; UUIDs (a MIG device) keep the order of the bundles.
    return sorted(
        bundles,
        key=lambda each: (first[each.node], int(each.gpu) if each.gpu and each.gpu.isdigit() else 0, each.index),
    )


def devices_here() -> tuple[str, str]:
    """Of the bundle this task runs in: Ray's id of the node, and the GPU's name there. Runs as a Ray task."""
    context = ray.get_runtime_context()
    (gpu,) = context.get_accelerator_ids()["GPU"]
    return context.get_node_id(), gpu


def by_node(bundles: Iterable[Bundle]) -> list[list[Bundle]]:
    """The bundles of each node, in the order they come."""
    nodes: dict[str, list[Bundle]] = defaultdict(list)
    for bundle in bundles:
        nodes[bundle.node].append(bundle)
    return list(nodes.values())


def deal(bundles: Sequence[Bundle], topology: Topology) -> Dealt | None:
    """Returns the devices of each actor, by role; None when an engine would have to span nodes."""
    dealt: Dealt = {}
    used = topology.num_shared
    for role in topology.roles:
        own = bundles
        if role.place is not Place.EVERY:
            begin = used if role.place is Place.OWN else 0
            own = bundles[begin : begin + role.num_devices]
        dealt[role.name] = within_nodes(own, role.devices_per_actor)[: role.num_actors]
        if len(dealt[role.name]) < role.num_actors:
            return None
        used += role.num_devices if role.place is Place.OWN else 0
    return dealt


def within_nodes(bundles: Sequence[Bundle], size: int) -> list[tuple[Bundle, ...]]:
    """As many times `size` devices of one node as there are, in order."""
    return [
        tuple(devices[start : start + size])
        for devices in by_node(bundles)
        for start in range(0, len(devices) - size + 1, size)
    ]


def divide(dealt: Dealt) -> dict[int, float]:
    """By bundle, the part of its device that each of its actors asks for."""
    users = Counter(bundle.index for devices in dealt.values() for own in devices for bundle in own)
    return {index: TAKEN / count for index, count in users.items()}


def slot(
    group: PlacementGroup, own: tuple[Bundle, ...], bundles: Iterable[Bundle], shares: Mapping[int, float]
) -> Allocation:
    """The slot of an actor with the devices `own` among all `bundles` of the run."""
    return Allocation(group, own, shares[own[0].index], visible_devices(own, bundles))


def visible_devices(own: tuple[Bundle, ...], bundles: Iterable[Bundle]) -> dict[str, str]:
    """Variables that show an actor all GPUs of the run on its node, its own first; nothing for CPU slots.

    Its own are cuda:0 and up. The others must be visible because CUDA IPC maps a peer's memory through a context on
    the peer's device; Ray alone would hide them.
    """
    gpus = [bundle.gpu for bundle in own if bundle.gpu is not None]
    if not gpus:
        return {}
    rest = [each.gpu for each in bundles if each.gpu is not None and each.node == own[0].node and each not in own]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*gpus, *rest]), KEEP_VISIBLE: "1"}
