"""Faults of engines for tests: they hold, slow down and die."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.rollout.fleet.worker import RolloutWorker
from rlframe.types.rollout import Completion, GenerationRequest
from rlframe.utils.errors import EngineDied
from tests.until import until


def in_engine(
    group: RolloutGroup, engine: int, fault: Callable[..., None], *arguments: object, **named: object
) -> None:
    """Runs `fault(worker, ...)` there."""
    actor = group.workers.actors[engine]
    group.workers.wait([actor.__ray_call__.remote(fault, *arguments, **named)], doing="sabotage", ranks=[engine])


def in_both(group: RolloutGroup, fault: Callable[..., None]) -> None:
    """Runs `fault(worker)` in both engines."""
    for engine in range(2):
        in_engine(group, engine, fault)


def hold(worker: RolloutWorker, released: Path) -> None:
    """The next `generate` of this engine begins when the file is there. Until then the file `NAME waits` is, too."""
    original = worker.engine.generate

    def held(requests: list[GenerationRequest]) -> list[Completion]:
        worker.engine.generate = original
        released.with_name(f"{released.name} waits").touch()
        until(released.exists)
        return original(requests)

    worker.engine.generate = held


def slow(worker: RolloutWorker) -> None:
    """The engine takes a second longer for each forward pass from here on; `fast` undoes it."""
    model = worker.engine.model  # type: ignore[attr-defined]
    model.undone = model.register_forward_pre_hook(lambda *_: time.sleep(1.0))


def fast(worker: RolloutWorker) -> None:
    worker.engine.model.undone.remove()  # type: ignore[attr-defined]


def die_at(worker: RolloutWorker, forward: int, *, error: bool = False) -> None:
    """The engine dies in the middle of its next `generate`, at this forward pass; with `error`, its core does and the
    actor lives."""
    original, seen = worker.engine.model.forward, []

    def fatal(*arguments: object, **named: object) -> object:
        seen.append(1)
        if len(seen) == forward:
            if error:
                raise EngineDied("the core of the engine ended")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    worker.engine.model.forward = fatal
