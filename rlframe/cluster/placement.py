"""Which devices each role gets: one Ray placement group, one bundle per device."""

from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlframe.utils.errors import ConfigError

SHARE = 0.4
"""Part of a device a colocated actor asks Ray for: two roles fit on one device, a third does not by accident."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A device for one actor."""

    group: PlacementGroup
    bundle: int
    gpu: bool

    def options(self) -> dict[str, object]:
        """Arguments for `actor.options(...)`."""
        return {
            "num_cpus": SHARE,
            "num_gpus": SHARE if self.gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundle
            ),
        }


@dataclass(kw_only=True, slots=True)
class Placement:
    """The devices of a run."""

    policy: list[Slot]
    """One per training rank."""
    engines: list[Slot]
    """One per engine; the same devices as the policy's when colocated."""
    group: PlacementGroup

    def release(self) -> None:
        """Give the devices back; a joined cluster keeps them reserved otherwise."""
        remove_placement_group(self.group)


def count_devices(*, num_ranks: int, num_engines: int, colocate: bool) -> int:
    """Devices a run needs."""
    return max(num_ranks, num_engines) if colocate else num_ranks + num_engines


def reserve(*, num_ranks: int, num_engines: int, colocate: bool, gpu: bool, timeout_s: float) -> Placement:
    """Reserve one bundle per device, close together, and deal them to the roles.

    Raises:
        ConfigError: the cluster has not that many devices, or they were not free within timeout_s seconds.
    """
    count = count_devices(num_ranks=num_ranks, num_engines=num_engines, colocate=colocate)
    kind = "GPU" if gpu else "CPU"
    available = ray.cluster_resources().get(kind, 0)
    wanted = (
        f"train.parallel ({num_ranks} ranks) and rollout.num_engines ({num_engines}) with cluster.colocate="
        f"{str(colocate).lower()} need {count} {kind} devices"
    )
    if available < count:
        raise ConfigError([f"{wanted}, the cluster has {available:g}; make the layout smaller or the cluster larger"])
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if gpu else {})
    group = placement_group([bundle] * count, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise ConfigError([f"{wanted}; they were not free within {timeout_s:g} s (cluster.start_timeout_s)"])
    slots = [Slot(group, index, gpu) for index in range(count)]
    engines = slots[:num_engines] if colocate else slots[num_ranks:]
    return Placement(policy=slots[:num_ranks], engines=engines, group=group)
