"""The roles of a run and the devices of each. Imports no ray, because it is needed before anything starts."""

from dataclasses import dataclass
from enum import StrEnum

POLICY, ENGINES = "policy", "engines"

CRITIC, TEACHER, TEACHER_ENGINES, REWARD_MODEL = "critic", "teacher", "teacher_engines", "reward_model"
JUDGE_ENGINES = "judge_engines"
"""Names of the roles besides the policy and its engines; that of a trained model is its folder in a checkpoint, too."""


class Place(StrEnum):
    """The devices of a run that a role gets."""

    SHARED = "shared"
    """The policy's devices, from the first on."""
    OWN = "own"
    """Devices of its own, after those of the policy and of every previous role."""
    EVERY = "every"
    """All devices of the run, from the first on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A part of a run that needs devices: the policy, its engines, a critic, a teacher."""

    name: str
    num_actors: int
    devices_per_actor: int = 1
    """Number of devices of one actor, all on one node."""
    actors_per_device: int = 1
    """Number of actors that share the same devices. Divides `num_actors`."""
    place: Place
    setting: str
    """The role's size and the settings that decide it, for messages: `critic (2 ranks, critic.colocate=true)`."""

    @property
    def num_devices(self) -> int:
        """Number of devices of all its actors."""
        return self.num_actors // self.actors_per_device * self.devices_per_actor


@dataclass(frozen=True, slots=True)
class Topology:
    """The roles of a run, in the order in which they get devices."""

    roles: tuple[Role, ...]

    @property
    def num_shared(self) -> int:
        """Number of devices of the policy and the roles that share them."""
        return max((role.num_devices for role in self.roles if role.place is Place.SHARED), default=0)

    @property
    def num_devices(self) -> int:
        """Number of devices that the run needs."""
        own = sum(role.num_devices for role in self.roles if role.place is Place.OWN)
        every = [role.num_devices for role in self.roles if role.place is Place.EVERY]
        return max([self.num_shared + own, *every])

    def __str__(self) -> str:
        """Returns the roles with the keys that size them, for messages."""
        *others, last = (role.setting for role in self.roles)
        return f"{', '.join(others)} and {last}" if others else last


def policy(num_ranks: int) -> Role:
    """Returns the role of the model in training."""
    return Role(name=POLICY, num_actors=num_ranks, place=Place.SHARED, setting=f"train.parallel ({num_ranks} ranks)")


def auxiliary(name: str, num_ranks: int, *, colocate: bool, setting: str | None = None) -> Role:
    """Returns the role of a further model in ranks. It is on the policy's devices if `colocate` is set.

    Args:
        setting: the setting that decides its devices; None means `<name>.colocate=...`.
    """
    setting = setting or f"{name}.colocate={str(colocate).lower()}"
    place = Place.SHARED if colocate else Place.OWN
    return Role(name=name, num_actors=num_ranks, place=place, setting=f"{name} ({num_ranks} ranks, {setting})")


def engines(num_engines: int, *, devices_per_engine: int = 1, engines_per_device: int = 1, colocate: bool) -> Role:
    """Returns the role of the policy's engines, on every device of the run or on their own."""
    each = f" of {devices_per_engine} devices" if devices_per_engine > 1 else ""
    each += f", {engines_per_device} on each device" if engines_per_device > 1 else ""
    return Role(
        name=ENGINES,
        num_actors=num_engines,
        devices_per_actor=devices_per_engine,
        actors_per_device=engines_per_device,
        place=Place.EVERY if colocate else Place.OWN,
        setting=f"rollout.num_engines ({num_engines}{each}) with cluster.colocate={str(colocate).lower()}",
    )
