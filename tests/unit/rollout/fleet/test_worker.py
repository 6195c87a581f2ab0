"""The actor of an engine, outside of Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.cluster.config import Device
from rlframe.models.config import ModelConfig
from rlframe.rollout.fleet import worker as fleet
from rlframe.rollout.fleet.worker import RolloutWorker


class Started(Exception):
    """Raised where the engine is built."""


class Engine:
    """An engine that notes with which early process it was prepared."""

    prepared: list[Any]

    def __init__(self, *_: Any, **__: Any):
        raise Started

    @classmethod
    def prepare(cls, config: Any, *, folder: Any, device: str, early: Any = None) -> None:  # noqa: ARG003
        cls.prepared.append(early)


@pytest.mark.parametrize("asked", [True, False], ids=["first", "restarted"])
def test_an_engine_is_prepared_once_with_the_process_that_was_started_ahead(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "prepared", [], raising=False)
    monkeypatch.setattr(fleet, "find", lambda *_, **__: (Engine, None))
    rollout = SimpleNamespace(name="own", devices_per_engine=1)
    setup: Any = SimpleNamespace(rollout=rollout, model=ModelConfig(path="qwen3_moe_tiny"), device=Device.CPU,
                                 profile=None, seed=0, with_routes=False, adapter=None, with_mtp=False,
                                 dtype=SimpleNamespace(value="float32"))  # fmt: skip
    actor = object.__new__(RolloutWorker)
    process = object()
    actor._ahead = SimpleNamespace(start=lambda: process)  # pyright: ignore[reportAttributeAccessIssue]
    actor.rank = 0
    actor._begin()
    if asked:
        actor.prepare(setup)
    with pytest.raises(Started):
        actor.start(setup)
    assert Engine.prepared == [process]
