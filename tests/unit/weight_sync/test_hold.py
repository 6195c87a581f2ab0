"""Weights that are held bring an engine back while the trainer trains on, with the proof of every sync."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.config import HoldIn, WeightSyncConfig
from rlframe.weight_sync.hold import owned
from tests.unit.models.parameters import shards
from tests.unit.weight_sync.groups import LocalSources, destination
from tests.unit.weight_sync.world import MODEL, Loader, World

NORM = "model.norm.weight"


class Busy(LocalSources):
    """Trainer ranks that are training: nothing may be asked of them."""

    def on_ranks(self, calls: Sequence[RankCall]) -> list[Any]:
        raise AssertionError(f"{calls[0]} is asked of ranks that train")


@pytest.fixture(params=["auto", "reload"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose trainer has published version 1 and trains on."""
    made = World(WeightSyncConfig(hold=HoldIn.HOST, transport=request.param))
    made.sync.calibrate(version=0)
    made.train_to(1)
    made.sync.publish(version=1)
    made.train_to(2)
    yield made
    made.sync.close()


def restart(world: World, engine: int) -> None:
    """Puts a new process in the place of an engine; it takes reloads, too."""
    world.restart(engine)
    ends = world.destinations.ranks
    first = world.destinations.engines().index(engine)
    for index, (layout, parameters) in enumerate(world.engines[engine]):
        ends[first + index] = destination(layout, parameters, dtype=torch.bfloat16, reload=Loader(layout, parameters))


def test_a_restarted_engine_gets_the_published_version_and_the_trainer_is_not_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart(world, 1)
    with monkeypatch.context() as busy:
        busy.setattr(world.sync, "_source", Busy(world.sources.ranks))
        world.sync.rejoin([1])
    world.expect(1)
    assert world.destinations.gates == {0: 1, 1: 1}
    world.sync.publish(version=2)
    world.expect(2)
    # And from the copy of that version, after the next step.
    world.train_to(3)
    restart(world, 0)
    restart(world, 1)
    world.sync.rejoin([0, 1])
    world.expect(2)
    world.sync.publish(version=3)
    world.expect(3)
    world.sync.audit()


def test_a_copy_that_was_damaged_is_found(world: World) -> None:
    restart(world, 1)
    for rank in world.sources.ranks:
        assert rank._copy is not None
        for name, copy in zip(rank._copy.names, rank._copy._copies, strict=True):
            if "final_layernorm" in name:
                copy[3] += 1
    with pytest.raises(WeightSyncFailed, match=f"engine 1 does not hold version 1 after a restart: {NORM} differs, 1 "):
        world.sync.rejoin([1])
    assert world.destinations.gates[0] == 1 and "did not arrive" in str(world.destinations.gates[1])


def test_a_restarted_engine_with_another_checkpoint_is_refused() -> None:
    world = World(WeightSyncConfig(hold=HoldIn.HOST))
    world.sync.calibrate(version=0)
    world.restart(1)
    world.engines[1][0][1]["decoder.final_layernorm.weight"][3] += 1
    with pytest.raises(WeightSyncFailed, match=f"after a restart: engine 1 does not hold the initial .*{NORM} differs"):
        world.sync.rejoin([1])


def test_new_ranks_of_the_trainer_hold_what_they_send() -> None:
    world = World(WeightSyncConfig(hold=HoldIn.HOST))
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.sync.publish(version=1)
    world.restart_trainer()
    world.sync.reattach(version=0)
    world.train_to(1)
    world.restart(0)
    assert world.sync.rejoin([0]) and world.destinations.gates == {0: 0, 1: 0}
    world.expect(0)


def test_replicas_are_held_once() -> None:
    once = World(WeightSyncConfig(hold=HoldIn.HOST), trainer=shards(MODEL))
    twice = World(WeightSyncConfig(hold=HoldIn.HOST), trainer=shards(MODEL) * 2)
    for world in (once, twice):
        world.sync.calibrate(version=0)
    held = once.sync.hold_metrics["memory/weight_sync_held_bytes"]
    assert held == twice.sync.hold_metrics["memory/weight_sync_held_bytes"]
    elements = sum(torch.Size(shape).numel() for shape in once.tensors.values())
    assert 4 * elements <= held < 4.1 * elements


def test_every_part_is_held_by_the_first_rank_that_has_it() -> None:
    world = World()
    layouts = [layout for layout, _ in world.trainer]
    kept = owned([*layouts, *layouts], frozenset(world.tensors))
    assert all(not layout.boxes and not layout.parameters for layout in kept[len(layouts) :])
    parts = [(name, box.region) for layout in kept for name, boxes in layout.boxes.items() for box in boxes]
    assert set(parts) == {
        (name, box.region) for layout in layouts for name, boxes in layout.boxes.items() for box in boxes
    }
    (without,) = owned(layouts[:1], frozenset({NORM}))
    assert set(without.parameters) <= {"decoder.final_layernorm.weight"}


def test_engines_on_another_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.weight_sync.endpoints.this_host", iter([*["trainer"] * 8, *["engine"] * 99]).__next__)
    with pytest.raises(WeightSyncFailed, match="weight_sync.hold=host is for engines on the host of the trainer's"):
        World(WeightSyncConfig(hold=HoldIn.HOST, transport="nccl"))


def test_nothing_is_held_unless_it_is_set() -> None:
    world = World()
    world.sync.calibrate(version=0)
    assert world.sync.hold_metrics == {} and all(rank._copy is None for rank in world.sources.ranks)
