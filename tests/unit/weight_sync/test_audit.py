"""What is proved besides the arrival of weights: replicas bit for bit, padding, and memory between two syncs."""

import pytest
import torch
from torch import Tensor

from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import WeightSource, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.boxes import window
from rlframe.weight_sync.layout.memory import MemoryLayout, record
from tests.unit.models.parameters import SMALL_MOE, shards
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination
from tests.unit.weight_sync.world import MODEL, Loader, World

NORM = "model.norm.weight"
EVERY = WeightSyncConfig(audit_every_steps=1)


def started(config: WeightSyncConfig = EVERY, **kind: object) -> World:
    """At version 1."""
    world = World(config, **kind)  # pyright: ignore[reportArgumentType]
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.sync.publish(version=1)
    return world


def flip(value: Tensor, element: int = 3, bit: int = 0) -> None:
    """Changes one bit of one element; bit 0 of a float32 is lost in bfloat16."""
    integer = torch.int32 if value.dtype == torch.float32 else torch.int16
    value.view(-1)[element : element + 1].view(integer).bitwise_xor_(1 << bit)


def set_padding(rank: tuple[MemoryLayout, dict[str, Tensor]], value: float) -> str:
    """Writes into the first padding of a rank; the parameter's name."""
    layout, parameters = rank
    padding = layout.padding[0]
    window(parameters[padding.parameter], padding.offset, padding.size, padding.stride)[0, 0] = value
    return padding.parameter


def replicas() -> World:
    """Two data-parallel copies of a whole trainer."""
    return World(EVERY, trainer=[*shards(MODEL), *shards(MODEL)])


def test_replicas_that_differ_in_bits_the_engines_do_not_get_are_named() -> None:
    world = replicas()
    world.sync.calibrate(version=0)
    world.train_to(1)
    flip(world.trainer[1][1]["decoder.final_layernorm.weight"])
    with pytest.raises(
        WeightSyncFailed, match=f"source ranks 0 and 1 hold different contents of the same part of {NORM}"
    ):
        world.sync.publish(version=1)


def test_replicas_of_a_tensor_that_no_engine_holds_are_compared() -> None:
    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        for name in p:
            p[name].copy_(c[name])

    def rank(names: list[str]) -> tuple[MemoryLayout, dict[str, Tensor]]:
        parameters = {name: torch.ones(3) for name in names}
        return record(load, parameters, {"body": (3,), "draft": (3,)}), parameters

    trainer, engine = [rank(["body", "draft"]), rank(["body", "draft"])], rank(["body"])
    sync = WeightSync(
        LocalSources([WeightSource(*each) for each in trainer]), LocalDestinations([[destination(*engine)]])
    )
    sync.connect()
    sync.calibrate(version=0)
    trainer[1][1]["draft"][2] = 2.0
    with pytest.raises(
        WeightSyncFailed, match="source ranks 0 and 1 hold different contents of the same part of draft"
    ):
        sync.publish(version=1)


def test_memory_that_nobody_touched_passes_the_audit() -> None:
    world = started()
    world.sync.audit()
    assert world.destinations.gates == {0: 1, 1: 1}


def test_an_engine_whose_memory_changes_after_its_digest_is_named() -> None:
    world = started()
    # Rank 1 of engine 1 is destination rank 2.
    flip(world.engines[1][1][1]["decoder.final_layernorm.weight"], bit=7)
    with pytest.raises(
        WeightSyncFailed, match=f"engine 1 no longer holds version 1: {NORM} has changed in the memory of dest.* rank 2"
    ):
        world.sync.audit()
    assert all(str(gate).startswith("the audit of version 1 failed") for gate in world.destinations.gates.values())


def test_a_trainer_whose_memory_changes_without_training_is_named() -> None:
    world = started()
    flip(world.trainer[6][1]["decoder.final_layernorm.weight"])
    with pytest.raises(WeightSyncFailed, match=f"source rank 6 no longer holds version 1: {NORM} has changed in the"):
        world.sync.audit()


def test_an_engine_that_loads_streams_itself_is_audited_too() -> None:
    world = started(WeightSyncConfig(transport="reload", audit_every_steps=1))
    world.sync.audit()
    flip(world.engines[0][0][1]["decoder.final_layernorm.weight"])
    with pytest.raises(WeightSyncFailed, match=r"engine 0 .* parameter decoder.final_layernorm.weight has changed in"):
        world.sync.audit()


@pytest.mark.parametrize(("transport", "is_told"), [("reload", True), ("shm", False)])
def test_parameters_that_audits_cannot_see_are_told(
    transport: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = WeightSyncConfig(transport=transport, audit_every_steps=1)
    world = World(config)
    # As vLLM does with weights that it packs for a CPU.
    parameters = dict(world.engines[0][0][1])
    packed = {"packed.weight": torch.empty(0), "counts": torch.zeros(2, dtype=torch.int64)}
    layout = world.engines[0][0][0]
    world.destinations.ranks[0] = destination(
        layout, parameters | packed, dtype=torch.bfloat16, reload=Loader(layout, parameters)
    )
    caplog.clear()
    world.sync.connect()
    assert ("audits leave out 2 parameters of the engines, such as counts, which" in caplog.text) == is_told
    world.sync.calibrate(version=0)
    world.sync.audit()


def test_a_restarted_engine_that_waits_is_not_audited() -> None:
    # Must not raise.
    world = started()
    world.train_to(2)
    world.restart(1)
    world.sync.rejoin([1])
    # The trainer has moved on, which the audit would say; the engines alone are as they should be.
    world.train_to(1)
    world.sync.audit()


def test_the_audit_is_due_every_so_many_versions_and_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = started(WeightSyncConfig(audit_every_steps=2))
    audited: list[int | None] = []
    monkeypatch.setattr(world.sync, "audit", lambda: audited.append(world.sync.policy_version))
    for version in (2, 3, 4):
        world.sync.publish(version=version)
        world.sync.audit_if_due()
    assert audited == [2, 4]
    world.sync.publish(version=5)
    world.sync.ask_for_audit()
    for _ in range(2):
        world.sync.audit_if_due()
    assert audited == [2, 4, 5], "asked for once"


def test_an_audit_that_is_asked_for_says_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    world = started(WeightSyncConfig(transport="reload", audit_every_steps=0))
    flip(world.engines[0][0][1]["decoder.final_layernorm.weight"])
    world.sync.ask_for_audit()
    with caplog.at_level("INFO"):
        world.sync.audit_if_due()
    (line,) = [line for line in caplog.messages if line.startswith("audited")]
    assert line == (
        "audited: the trainer holds version 1; weight_sync.audit_every_steps=0 leaves engines out that take reloads"
    )


@pytest.mark.parametrize("side", ["source", "engine"])
def test_padding_that_is_not_zero_is_named(side: str) -> None:
    world = started()
    # A vocabulary of 37 is padded in the last shard; engine 1 has destination ranks 1 and 2.
    ranks, first, owner = (
        (world.trainer, 0, "source rank") if side == "source" else (world.engines[1], 1, "engine 1, destination rank")
    )
    place = next(index for index, (layout, _) in enumerate(ranks) if layout.padding)
    name = set_padding(ranks[place], -0.0)
    with pytest.raises(WeightSyncFailed, match=f"{owner} {first + place}: the padding of parameter {name}, which no"):
        world.sync.audit()


def test_padding_of_the_trainer_is_proved_with_every_sync() -> None:
    world = started()
    name = set_padding(next(pair for pair in world.trainer if pair[0].padding), 1.0)
    with pytest.raises(WeightSyncFailed, match=f"the padding of parameter {name}"):
        world.sync.publish(version=2)


def test_tied_weights_of_one_rank_that_drift_apart_name_the_rank() -> None:
    tied = FAMILY.architecture(SMALL_MOE | {"tie_word_embeddings": True})
    world = World(EVERY, trainer=shards(tied, pp=2), model=tied)
    world.sync.calibrate(version=0)
    world.train_to(1)
    flip(world.trainer[1][1]["output_layer.weight"])
    with pytest.raises(
        WeightSyncFailed,
        match="source ranks 0 and 1 hold different contents of the same part of model.embed_tokens.weight",
    ):
        world.sync.publish(version=1)


@pytest.mark.parametrize("transport", ["shm", "reload"])
def test_a_bit_that_is_changed_to_test_the_proof_is_noticed_and_sent_again(transport: str) -> None:
    world = started(WeightSyncConfig(transport=transport, audit_every_steps=1))
    assert world.destinations.call(DestinationRank.disturb, engines=[0])[0] == "model.embed_tokens.weight"
    with pytest.raises(WeightSyncFailed, match=r"engine 0 no longer holds version 1: .*embed.* has changed"):
        world.sync.audit()
    world.train_to(2)
    world.sync.publish(version=2)
    world.sync.audit()
    world.expect(2)


def test_a_parameter_that_is_packed_elsewhere_is_not_disturbed() -> None:
    parameters = {"packed": torch.empty(0), "norm": torch.ones(3)}
    rank = destination(None, parameters, tensors={"norm": (3,)}, refusal="packs its weights")
    before = rank.snapshot()
    assert rank.disturb() == "norm" and rank.snapshot() != before
