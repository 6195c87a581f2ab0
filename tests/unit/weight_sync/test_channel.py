"""Calibration, publishing and proof: what arrives, and how each kind of failure is told apart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe.models.families.base import Shard
from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.utils.errors import WeightSyncFailed, WorkerDied
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import WeightSource, WeightSync
from rlframe.weight_sync.config import HoldIn, WeightSyncConfig
from rlframe.weight_sync.layout.boxes import window
from rlframe.weight_sync.layout.memory import MemoryLayout, identity_layout, load_tensor, record
from tests.unit.models.parameters import SMALL_MOE, empty, shards
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination
from tests.unit.weight_sync.world import World, after_pull

NORM, KEYS, DOWN = (
    "model.norm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.experts.2.down_proj.weight",
)


@pytest.fixture
def world() -> World:
    return World()


def test_published_weights_arrive_bit_for_bit_in_every_engine(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    report = world.sync.publish(version=1)
    world.expect(1)
    # The first engine holds the model once; the two ranks of the second share the cut tensors and both hold the rest.
    assert report.version == 1 and world.sync.policy_version == 1
    assert world.destinations.gates == {0: 1, 1: 1}
    assert report.num_bytes == 4 * sum(
        box.rows * box.cols
        for ranks in world.engines
        for layout, _ in ranks
        for boxes in layout.boxes.values()
        for box in boxes
    )


def test_packed_messages_arrive_bit_for_bit() -> None:
    # 1024 bytes over 8 ranks: 128 bytes a message, less than two rows of most tensors.
    world = World(WeightSyncConfig(transport="nccl", chunk_bytes=1024, timeout_s=30))
    world.sync.calibrate(version=0)
    for version in (1, 2):
        world.train_to(version)
        assert world.sync.publish(version=version).transport == "nccl"
        world.expect(version)
    world.sync.close()


def test_calibration_refuses_weights_that_are_not_where_they_were_recorded(world: World) -> None:
    parameter = world.engines[0][0][1]["decoder.layers.1.self_attention.linear_qkv.weight"]
    parameter.copy_(parameter.roll(1, 0))
    with pytest.raises(
        WeightSyncFailed, match=r"calibration: engine 0 does not hold version 0: model.layers.1.self_attn"
    ):
        world.sync.calibrate(version=0)
    assert str(world.destinations.gates[0]).startswith("the sync of version 0 failed: engine 0 does not hold")


def test_calibration_says_that_the_trainer_alone_has_rounded_what_engines_hold_in_more_digits() -> None:
    held = {"gate": torch.tensor([[0.1, 0.5], [0.3, 1.0]])}
    rounded = {"gate": held["gate"].bfloat16()}
    sources = LocalSources([WeightSource(identity_layout(rounded), rounded)])
    engine = LocalDestinations([[destination(identity_layout(held), held)]])
    sync = WeightSync(sources, engine, WeightSyncConfig())
    sync.connect()
    with pytest.raises(WeightSyncFailed, match="holds it as bfloat16 and the engine as float32.*train.dtype=float32"):
        sync.calibrate(version=0)
    sync.close()


def test_a_restarted_engine_is_proved_against_the_first_checkpoint_and_brought_up(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.sync.publish(version=1)
    world.restart(1)
    world.sync.rejoin([1])
    world.expect(1)
    assert world.destinations.gates == {0: 1, 1: 1}
    world.train_to(2)
    world.sync.publish(version=2)
    world.expect(2)


def test_a_restarted_engine_with_another_checkpoint_is_refused(world: World) -> None:
    world.sync.calibrate(version=0)
    world.restart(1)
    world.engines[1][0][1]["decoder.final_layernorm.weight"][3] += 1
    with pytest.raises(WeightSyncFailed, match=f"after a restart: engine 1 does not hold the initial .*{NORM} differs"):
        world.sync.rejoin([1])
    assert world.destinations.gates[0] == 0 and "after a restart" in str(world.destinations.gates[1])


def test_a_trainer_that_starts_anew_takes_the_engines_back_to_the_first_version(world: World) -> None:
    world.sync.calibrate(version=0)
    for version in (1, 2):
        world.train_to(version)
        world.sync.publish(version=version)
    world.restart_trainer()
    world.sync.reattach(version=0)
    world.expect(0)
    assert world.destinations.gates == {0: 0, 1: 0} and world.sync.policy_version == 0
    world.train_to(1)
    world.sync.publish(version=1)
    world.expect(1)


def test_a_trainer_that_starts_anew_with_another_checkpoint_is_refused(world: World) -> None:
    world.sync.calibrate(version=0)
    world.restart_trainer()
    for _, parameters in world.trainer:
        if (norm := parameters.get("decoder.final_layernorm.weight")) is not None:
            norm[3] += 1
    with pytest.raises(WeightSyncFailed, match=f"the trainer does not hold the initial checkpoint: {NORM} differs, 1 "):
        world.sync.reattach(version=0)


def test_a_restarted_engine_waits_when_the_trainer_has_moved_on(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.restart(1)
    world.sync.rejoin([1])
    assert world.destinations.gates == {0: 0, 1: "restarted and waiting for the next version"}
    world.sync.publish(version=1)
    world.expect(1)


def test_an_engine_that_died_is_revived_and_the_version_published_once_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    alive = world.destinations.receive

    def dead(version: int, *, engines: object = None) -> list[Any]:
        raise WorkerDied("engine 1 is gone")

    def revive() -> list[int]:
        world.restart(1)
        monkeypatch.setattr(world.destinations, "receive", alive)
        return [1]

    monkeypatch.setattr(world.destinations, "receive", dead)
    with pytest.raises(WorkerDied, match="engine 1 is gone"):
        world.sync.publish(version=1)
    monkeypatch.setattr(world.destinations, "revive", revive)
    world.sync.publish(version=1)
    world.expect(1)
    assert world.destinations.gates == {0: 1, 1: 1}


@pytest.mark.parametrize("place", ["connect", "receive", "admission", "commit"])
def test_engines_may_die_anywhere_in_a_publish(world: World, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    ends = world.destinations

    def revive() -> list[int]:
        world.restart(1)
        if place == "admission":
            dies_once(ends, "on_ranks", monkeypatch)
            monkeypatch.setattr(ends, "revive", lambda: world.restart(0) or [0])
        return [1]

    monkeypatch.setattr(ends, "revive", revive)
    if place == "connect":
        world.sync.close()
    dies_once(ends, {"connect": "on_ranks", "admission": "receive"}.get(place, place), monkeypatch)
    world.sync.publish(version=1)
    world.expect(1)
    assert ends.gates == {0: 1, 1: 1}


@pytest.mark.parametrize("again", [0, 1])
@pytest.mark.parametrize("hold", list(HoldIn))
def test_engines_may_die_while_others_come_back(hold: HoldIn, again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(WeightSyncConfig(hold=hold))
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.sync.publish(version=1)
    world.restart(0)
    receive = world.destinations.receive

    def late(version: int, *, engines: Any = None) -> list[Any]:
        receive(version, engines=engines)
        raise WorkerDied(f"engine {again} is gone")

    monkeypatch.setattr(world.destinations, "receive", late)
    with pytest.raises(WorkerDied):
        world.sync.rejoin([0])
    monkeypatch.setattr(world.destinations, "receive", receive)
    world.restart(again)
    world.sync.rejoin(sorted({0, again}))
    world.expect(1)
    assert world.destinations.gates == {0: 1, 1: 1}
    world.sync.close()


def dies_once(ends: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an engine die in the next call of `method`."""
    alive = getattr(ends, method)

    def dead(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(ends, method, alive)
        raise WorkerDied("an engine is gone")

    monkeypatch.setattr(ends, method, dead)


def test_lost_weights_are_restored_and_proved(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.sync.publish(version=1)
    for _, parameters in world.engines[0]:
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
    world.destinations.call(DestinationRank.clear_padding)
    world.sync.restore()
    world.expect(1)


def test_what_the_trainer_no_longer_holds_is_not_restored(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    with pytest.raises(WeightSyncFailed, match="version 0 cannot be sent to an engine again: the trainer's weights"):
        world.sync.restore()
    assert all(isinstance(gate, str) for gate in world.destinations.gates.values())


def test_engines_go_on_at_the_old_version_when_the_trainer_dies_before_a_byte_moved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sync.calibrate(version=0)

    def dead(method: str, arguments: object = None) -> list[Any]:
        raise WorkerDied("trainer rank 3 is gone")

    monkeypatch.setattr(world.sources, "call", dead)
    monkeypatch.setattr(world.destinations, "receive", lambda version, engines=None: dead("receive"))
    with pytest.raises(WorkerDied, match="engine 0 holds version 0, engine 1 holds version 0; the trainer does not"):
        world.sync.publish(version=1)
    assert world.destinations.gates == {0: 0, 1: 0}


def test_a_corrupted_element_names_engine_tensor_and_box(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    layout, parameters = world.engines[1][1]
    after_pull(
        world.destinations.ranks[2],
        lambda: layout.boxes[KEYS][0].view(parameters).view(torch.int16)[3, 5].bitwise_xor_(1),
        monkeypatch,
    )
    # Rank 1 of engine 1 is destination rank 2; its KV group is the second, rows 8..15.
    with pytest.raises(
        WeightSyncFailed,
        match=rf"engine 1 does not hold version 1: {KEYS} differs; first at rows 8\.\.15, columns 0\.\.15 on "
        r"destination rank 2 \(source ranks 4, 5, 6, 7\)",
    ) as caught:
        world.sync.publish(version=1)
    assert world.sync.policy_version == 0
    assert all(isinstance(gate, str) for gate in world.destinations.gates.values())
    # The other engine has the new version, and this one has neither.
    assert "engine 0 holds version 1, engine 1 holds neither version 0 nor version 1 completely" in str(caught.value)


def test_a_skipped_tensor_is_named_as_not_arrived(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    link = world.links[0]
    kept = link.parts[0].select(np.array([DOWN not in copy.tensors for copy in link.parts[0]]))
    assert len(kept) < len(link.parts[0])
    world.destinations.ranks[0].connect(replace(link, parts=(kept,)))
    with pytest.raises(WeightSyncFailed, match=rf"engine 0 still holds version 0: {DOWN} of version 1 did not arrive"):
        world.sync.publish(version=1)


def test_an_engine_that_was_not_updated_is_stale(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    monkeypatch.setattr(world.destinations.ranks[0]._transport, "pull", lambda part=0: None)
    with pytest.raises(
        WeightSyncFailed, match="engine 0 still holds version 0: model.embed_tokens.weight of version 1"
    ):
        world.sync.publish(version=1)


def test_replicas_that_drift_apart_are_named(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    # Ranks 4 to 7 are the second pipeline stage; each holds the whole final norm.
    world.trainer[6][1]["decoder.final_layernorm.weight"][3] += 1
    with pytest.raises(
        WeightSyncFailed, match=f"source ranks 4 and 6 hold different contents of the same part of {NORM}"
    ):
        world.sync.publish(version=1)


def test_versions_only_go_up_and_start_with_calibration(world: World) -> None:
    with pytest.raises(WeightSyncFailed, match="version 1 cannot be published before calibrate"):
        world.sync.publish(version=1)
    world.sync.calibrate(version=2)
    with pytest.raises(WeightSyncFailed, match="version 2 must be newer than the published version 2"):
        world.sync.publish(version=2)


def test_tied_weights_held_twice_by_the_trainer_must_agree() -> None:
    tied = FAMILY.architecture(SMALL_MOE | {"tie_word_embeddings": True})
    tensors = FAMILY.tensors(tied)

    def tied_rank(shard: Shard) -> tuple[MemoryLayout, dict[str, Tensor]]:
        parameters = empty(tied, shard)
        return record(lambda p, c: FAMILY.load(p, c, tied, shard), parameters, tensors), parameters

    trainer = [tied_rank(shard) for shard in shards(tied, pp=2)]
    engine = tied_rank(shards(tied)[0])
    for layout, parameters in [*trainer, engine]:
        for index, (name, shape) in enumerate(tensors.items()):
            load_tensor(layout, parameters, name, torch.full(shape, float(index)))
    sources = LocalSources([WeightSource(*pair) for pair in trainer])
    sync = WeightSync(sources, LocalDestinations([[destination(*engine)]]))
    sync.connect()
    sync.calibrate(version=0)
    trainer[1][1]["output_layer.weight"][5, 0] += 1
    with pytest.raises(
        WeightSyncFailed,
        match="source ranks 0 and 1 hold different contents of the same part of model.embed_tokens.weight",
    ):
        sync.publish(version=1)


def test_memory_that_was_lost_is_whole_after_a_sync_padding_included() -> None:
    world = World()
    world.sync.calibrate(version=0)
    padded = [layout.padding for ranks in world.engines for layout, _ in ranks if layout.padding]
    assert padded, "a vocabulary of 37 on two ranks"
    for ranks in world.engines:
        for _, parameters in ranks:
            for parameter in parameters.values():
                parameter.fill_(torch.nan)
    world.fill(world.trainer, 1)
    world.sync.publish(version=1)
    for ranks in world.engines:
        for layout, parameters in ranks:
            assert all(bool(parameter.isfinite().all()) for parameter in parameters.values())
            for part in layout.padding:
                assert not window(parameters[part.parameter], part.offset, part.size, part.stride).any()
