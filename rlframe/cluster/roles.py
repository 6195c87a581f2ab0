"""How many devices the roles of a run need. Light: imports no ray, for it is asked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A model beside the policy, such as its critic."""

    num_ranks: int
    colocate: bool
    """True: on the policy's devices, from the first on. False: on devices of its own."""
    ranks_per_actor: int = 1
    """Devices of each actor, all on one node: above 1 for an engine of several."""
    setting: str | None = None
    """The setting that says where it is, for messages; `<role>.colocate=...` when None."""


NOTHING_BESIDE: Mapping[str, Beside] = {}


def count_devices(
    *,
    num_ranks: int,
    num_engines: int,
    devices_per_engine: int = 1,
    colocate: bool,
    beside: Mapping[str, Beside] = NOTHING_BESIDE,
) -> int:
    """Devices a run needs."""
    models, engines = count_model_devices(num_ranks, beside), num_engines * devices_per_engine
    return max(models, engines) if colocate else models + engines


def count_model_devices(num_ranks: int, beside: Mapping[str, Beside]) -> int:
    """Devices of the policy and the models beside it."""
    shared = max([num_ranks, *(each.num_ranks for each in beside.values() if each.colocate)])
    return shared + sum(each.num_ranks for each in beside.values() if not each.colocate)


def describe(
    *, num_ranks: int, num_engines: int, devices_per_engine: int, colocate: bool, beside: Mapping[str, Beside]
) -> str:
    """The roles of a run with the keys that size them, for messages."""
    each = f" of {devices_per_engine} devices" if devices_per_engine > 1 else ""
    models = [f"train.parallel ({num_ranks} ranks)"] + [
        f"{role} ({further.num_ranks} ranks, {further.setting or f'{role}.colocate={str(further.colocate).lower()}'})"
        for role, further in beside.items()
    ]
    return (
        f"{', '.join(models)} and rollout.num_engines ({num_engines}{each}) with cluster.colocate="
        f"{str(colocate).lower()}"
    )
