"""Calibration, publishing and proof: what arrives, and how each kind of failure is told apart."""

import pytest
import torch
from torch import Tensor

from rlframe.models.families.base import Architecture, Shard
from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.channel import WeightDestination, WeightSource, WeightSync
from rlframe.weight_sync.layout import Layout, clear_padding, load_tensor, record
from unit.models.parameters import empty, shards
from unit.weight_sync.groups import LocalDestinations, LocalSources

HF = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
MODEL = FAMILY.architecture(HF)
TENSORS = FAMILY.tensors(MODEL)
NORM, KEYS, DOWN = (
    "model.norm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.experts.2.down_proj.weight",
)


class World:
    """Trainer ranks in float32 at TP2 PP2 EP2, and two engines in bfloat16: one whole, one on two ranks."""

    def __init__(self) -> None:
        self.trainer = [
            rank(MODEL, shard, torch.float32) for shard in shards(MODEL, tp=2, pp=2, ep=2, vocab_multiple=8)
        ]
        engines = [shards(MODEL), shards(MODEL, tp=2, etp=1)]
        self.engines = [[rank(MODEL, shard, torch.bfloat16) for shard in group] for group in engines]
        self.fill(self.trainer, 0)
        for engine in self.engines:
            self.fill(engine, 0)
        self.sources = LocalSources([WeightSource(*pair) for pair in self.trainer])
        self.destinations = LocalDestinations([[WeightDestination(*pair) for pair in ranks] for ranks in self.engines])
        self.sync = WeightSync(self.sources, self.destinations)
        self.plan = self.sync.connect()

    @staticmethod
    def values(version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}

    def fill(self, ranks: list[tuple[Layout, dict[str, Tensor]]], version: int) -> None:
        for layout, parameters in ranks:
            clear_padding(layout, parameters)
            for name, value in self.values(version).items():
                load_tensor(layout, parameters, name, value)

    def train_to(self, version: int) -> None:
        """The optimizer's doing: new values in place."""
        self.fill(self.trainer, version)


def rank(a: Architecture, shard: Shard, dtype: torch.dtype) -> tuple[Layout, dict[str, Tensor]]:
    parameters = empty(a, shard, dtype)
    return record(lambda p, c: FAMILY.load(p, c, a, shard), parameters, TENSORS), parameters


@pytest.fixture
def world() -> World:
    return World()


def test_published_weights_arrive_bit_for_bit_in_every_engine(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    report = world.sync.publish(version=1)
    for engine in world.engines:
        for layout, parameters in engine:
            expected = {name: torch.full_like(value, 7.0) for name, value in parameters.items()}
            world.fill([(layout, expected)], 1)
            assert all(torch.equal(parameters[name], expected[name]) for name in parameters)
    # The first engine holds the model once; the two ranks of the second share the cut tensors and both hold the rest.
    assert report.version == 1 and world.sync.policy_version == 1
    assert all(rank.verified and rank.version == 1 for rank in world.destinations.ranks)
    assert report.num_bytes == 4 * sum(
        box.rows * box.cols
        for layout in world.destinations.layouts()
        for boxes in layout.boxes.values()
        for box in boxes
    )


def test_engines_sample_only_verified_weights(world: World) -> None:
    engine = world.destinations.ranks[0]
    with pytest.raises(WeightSyncFailed, match="engine holds weights of version None that are not verified"):
        engine.require_verified()
    world.sync.calibrate(version=3)
    engine.require_verified()
    assert engine.version == 3
    engine.begin(4)
    with pytest.raises(WeightSyncFailed, match="version 4 that are not verified"):
        engine.require_verified()


def test_calibration_refuses_weights_that_are_not_where_they_were_recorded(world: World) -> None:
    parameter = world.engines[0][0][1]["decoder.layers.1.self_attention.linear_qkv.weight"]
    parameter.copy_(parameter.roll(1, 0))
    with pytest.raises(
        WeightSyncFailed, match=r"calibration: engine 0 does not hold version 0: model.layers.1.self_attn"
    ):
        world.sync.calibrate(version=0)
    assert not world.destinations.ranks[0].verified


def test_a_corrupted_element_names_engine_tensor_and_box(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    pull = world.destinations.pull

    def corrupt() -> None:
        pull()
        layout, parameters = world.engines[1][1]
        box = layout.boxes[KEYS][0]
        box.view(parameters).view(torch.int16)[3, 5] ^= 1

    monkeypatch.setattr(world.destinations, "pull", corrupt)
    # Rank 1 of engine 1 is destination rank 2; its KV group is the second, rows 8..15.
    with pytest.raises(
        WeightSyncFailed,
        match=rf"engine 1 does not hold version 1: {KEYS} differs; first at rows 8\.\.15, columns 0\.\.15 on "
        r"destination rank 2 \(source ranks 4, 5, 6, 7\)",
    ):
        world.sync.publish(version=1)
    assert world.sync.policy_version == 0
    assert not any(rank.verified for rank in world.destinations.ranks)


def test_a_skipped_tensor_is_named_as_not_arrived(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    kept = [copy for copy in world.plan.copies_for(0) if DOWN not in copy.tensors]
    assert len(kept) < len(world.plan.copies_for(0))
    world.destinations.ranks[0].connect(kept, world.sources.memories("shm"), "shm")
    with pytest.raises(WeightSyncFailed, match=rf"engine 0 still holds version 0: {DOWN} of version 1 did not arrive"):
        world.sync.publish(version=1)


def test_an_engine_that_was_not_updated_is_stale(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    monkeypatch.setattr(world.destinations.ranks[0], "pull", lambda: None)
    with pytest.raises(
        WeightSyncFailed, match="engine 0 still holds version 0: model.embed_tokens.weight of version 1"
    ):
        world.sync.publish(version=1)


def test_replicas_that_drift_apart_are_named(world: World) -> None:
    world.sync.calibrate(version=0)
    world.train_to(1)
    # Ranks 4 to 7 are the second pipeline stage; each holds the whole final norm.
    world.trainer[6][1]["decoder.final_layernorm.weight"][3] += 1
    with pytest.raises(WeightSyncFailed, match=f"source ranks 4 and 6 hold the same part of {NORM} with different"):
        world.sync.publish(version=1)


def test_versions_only_go_up_and_start_with_calibration(world: World) -> None:
    with pytest.raises(WeightSyncFailed, match="version 1 cannot be published before calibrate"):
        world.sync.publish(version=1)
    world.sync.calibrate(version=2)
    with pytest.raises(WeightSyncFailed, match="version 2 is not newer than version 2"):
        world.sync.publish(version=2)


def test_tied_weights_held_twice_by_the_trainer_must_agree() -> None:
    tied = FAMILY.architecture(HF | {"tie_word_embeddings": True})
    tensors = FAMILY.tensors(tied)

    def tied_rank(shard: Shard) -> tuple[Layout, dict[str, Tensor]]:
        parameters = empty(tied, shard)
        return record(lambda p, c: FAMILY.load(p, c, tied, shard), parameters, tensors), parameters

    trainer = [tied_rank(shard) for shard in shards(tied, pp=2)]
    engine = tied_rank(shards(tied)[0])
    for layout, parameters in [*trainer, engine]:
        for index, (name, shape) in enumerate(tensors.items()):
            load_tensor(layout, parameters, name, torch.full(shape, float(index)))
    sources = LocalSources([WeightSource(*pair) for pair in trainer])
    sync = WeightSync(sources, LocalDestinations([[WeightDestination(*engine)]]))
    sync.connect()
    sync.calibrate(version=0)
    trainer[1][1]["output_layer.weight"][5, 0] += 1
    with pytest.raises(WeightSyncFailed, match="source ranks 0 and 1 hold the same part of model.embed_tokens.weight"):
        sync.publish(version=1)
