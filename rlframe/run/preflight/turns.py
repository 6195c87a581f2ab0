"""Seconds in which roles on shared devices go to sleep and wake.

Source: rlframe/loops/phases.py, which puts all others to sleep before the role of a phase wakes, and leaves alone who
is there already; rlframe/megatron/worker/offload.py, which copies main weights and moments to pinned host memory and
back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlframe.rollout.served.config import ServedConfig
from rlframe.run.preflight import constants
from rlframe.run.preflight.engine import EngineMemory
from rlframe.run.preflight.trainer import GRADIENTS, MOMENTS, TrainerMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleeper:
    """A role that leaves its device's memory to others."""

    sleep_s: float
    wake_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A part of a step in which one role has the devices."""

    phase: str
    """Name of the phase that its seconds belong to."""
    role: str
    wakes: bool = True
    """Whether the role wakes, or others only make room for it."""


def changes(turns: Iterable[Turn], sleepers: Mapping[str, Sleeper]) -> dict[str, float]:
    """Returns the seconds of sleeping and waking of each phase, in a step that follows others like it."""
    turns, awake, found = list(turns), dict.fromkeys(sleepers, True), dict[str, float]()
    for _ in range(2):
        found = dict.fromkeys((turn.phase for turn in turns), 0.0)
        for turn in turns:
            for role, each in sleepers.items():
                if role == turn.role and not awake[role] and turn.wakes:
                    found[turn.phase] += each.wake_s
                    awake[role] = True
                elif role != turn.role and awake[role]:
                    found[turn.phase] += each.sleep_s
                    awake[role] = False
    return found


def of_trainer(memory: TrainerMemory) -> Sleeper:
    """Returns the times of a role that trains: main weights and moments over the host's link, each way, if they are
    moved; and their memory and that of gradients, given back and taken again."""
    kept = taken = 0.0
    for stage in memory.stages():
        states = {part.name: part.bytes for part in memory.states(stage)}
        moved = states.get("main weights", 0.0) + states[MOMENTS] if memory.train.offload_optimizer else 0.0
        kept, taken = max(kept, moved), max(taken, moved + states[GRADIENTS])
    copied = kept / constants.HOST_BANDWIDTH
    return Sleeper(
        sleep_s=copied + taken / constants.GIVE_BACK_BANDWIDTH, wake_s=copied + taken / constants.TAKE_BANDWIDTH
    )


def of_engine(memory: EngineMemory) -> Sleeper:
    """Returns the times of an engine, whose weights wake for the sync already: see `weights_wake`."""
    given_back = memory.weights_bytes + memory.cache_bytes
    return Sleeper(
        sleep_s=given_back / constants.GIVE_BACK_BANDWIDTH + weights_copy(memory),
        wake_s=memory.cache_bytes / constants.TAKE_BANDWIDTH,
    )


def weights_wake(memory: EngineMemory) -> float:
    """Returns the seconds in which the weights of an engine asleep get their memory again, before a sync."""
    return memory.weights_bytes / constants.TAKE_BANDWIDTH + weights_copy(memory)


def weights_copy(memory: EngineMemory) -> float:
    """Returns the seconds of the weights' way to host memory, or back, with rollout.sleep_level=1."""
    copied = isinstance(memory.config, ServedConfig) and memory.config.sleep_level == 1
    return memory.weights_bytes / constants.HOST_BANDWIDTH if copied else 0.0
