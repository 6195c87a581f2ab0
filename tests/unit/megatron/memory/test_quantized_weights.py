"""What ranks send to engines that compute in FP8 is the quantisation of whole weights, and is proved."""

import pytest
import torch
from torch import Tensor

from rlframe.megatron.memory.quantized import QuantizedWeights
from rlframe.models.families.base import Shard
from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.models.quantized import blocks
from rlframe.models.quantized.blocks import SCALE, EngineFormat
from rlframe.models.quantized.fp8 import Fp8
from rlframe.utils.errors import WeightsDrifted, WeightSyncFailed
from rlframe.weight_sync.channel import WeightDestination, WeightSource, WeightSync
from rlframe.weight_sync.layout.boxes import Box
from rlframe.weight_sync.layout.memory import MemoryLayout, clear_padding, export_tensor, load_tensor, record
from tests.unit.models.parameters import SMALL_MOE, shards
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination
from tests.unit.weight_sync.world import after_pull, rank

pytestmark = pytest.mark.later
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "mlp_only_layers": [0],
}  # fmt: skip
"""One dense layer and one of experts, whose parts on two ranks are whole blocks. A block has the rows of two heads."""
MODEL = FAMILY.architecture(SMALL_MOE | WIDE)
TENSORS = FAMILY.tensors(MODEL)
FORMATS = [EngineFormat.FP8_BLOCK, EngineFormat.FP8_BLOCK_POWERS_OF_2]
NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


def values(version: int) -> dict[str, Tensor]:
    """The weights of that version, some of them much larger than others."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-9, 3, shape, generator=generator)
        for name, shape in TENSORS.items()
    }


def quantised(version: int, engine_format: EngineFormat) -> dict[str, Tensor]:
    """What engines hold of that version: whole tensors, quantised at once."""
    found = {}
    for name, value in values(version).items():
        found[name] = value.bfloat16()
        if name in blocks.matrices(TENSORS):
            found[name], found[name + SCALE] = Fp8((128, 128)).quantize(
                value.bfloat16(), powers_of_2=engine_format.powers_of_2
            )
    return found


class Ranks:
    """The ranks of one side, in bfloat16, and what they send."""

    def __init__(self, split: list[Shard], engine_format: EngineFormat, version: int):
        self.ranks = [rank(MODEL, shard, torch.bfloat16) for shard in split]
        self.load(version)
        self.sent = [QuantizedWeights(*each, engine_format) for each in self.ranks]

    def load(self, version: int) -> None:
        for layout, parameters in self.ranks:
            clear_padding(layout, parameters)
            for name, value in values(version).items():
                load_tensor(layout, parameters, name, value)

    def train_to(self, version: int) -> None:
        self.load(version)
        for each in self.sent:
            each.update()

    def whole(self) -> dict[str, Tensor]:
        """The tensors that all ranks hold together."""
        found = {}
        for name, shape in blocks.stored(TENSORS).items():
            held = [each for each in self.sent if name in each.layout.boxes]
            found[name] = torch.zeros(shape, dtype=held[0].layout.dtype(name))
            for each in held:
                export_tensor(each.layout, each.parameters, name, found[name])
        return found


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.thorough
@pytest.mark.parametrize("engine_format", FORMATS, ids=str)
@pytest.mark.parametrize("split", [{}, {"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "etp": 2}], ids=str)
def test_ranks_send_the_quantisation_of_whole_weights(split: dict[str, int], engine_format: EngineFormat) -> None:
    ranks = Ranks(shards(MODEL, **split), engine_format, version=0)
    ranks.train_to(1)
    found, expected = ranks.whole(), quantised(1, engine_format)
    assert found.keys() == expected.keys()
    assert not [name for name in found if not same(found[name], expected[name])]
    assert found[NAME].dtype is torch.float8_e4m3fn and found[NAME + SCALE].shape == (2, 2)
    assert found["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16


class World:
    """A trainer of several ranks, and an engine of two that has loaded the same weights by itself."""

    def __init__(self) -> None:
        self.trainer = Ranks(shards(MODEL, tp=2, ep=2), EngineFormat.FP8_BLOCK, version=0)
        self.engine = Ranks(shards(MODEL, tp=2), EngineFormat.FP8_BLOCK, version=0)
        sources = LocalSources([WeightSource(each.layout, each.parameters) for each in self.trainer.sent])
        ends = [destination(each.layout, each.parameters, dtype=torch.bfloat16) for each in self.engine.sent]
        self.ends: list[WeightDestination] = ends
        self.sync = WeightSync(sources, LocalDestinations([ends]))
        self.sync.connect()
        self.sync.calibrate(version=0)


def test_engines_get_the_bits_that_ranks_quantise() -> None:
    world = World()
    world.trainer.train_to(1)
    report = world.sync.publish(version=1)
    found, expected = world.engine.whole(), quantised(1, EngineFormat.FP8_BLOCK)
    assert not [name for name in found if not same(found[name], expected[name])]
    plain = sum(2 * each.numel() for _, parameters in world.engine.ranks for each in parameters.values())
    assert report.num_bytes < 0.52 * plain


@pytest.mark.thorough
@pytest.mark.parametrize(("tensor", "bit"), [(NAME, 1), (NAME + SCALE, 1), (NAME + SCALE, 128)])
def test_a_flipped_bit_in_an_engine_is_noticed(tensor: str, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.trainer.train_to(1)
    box = world.engine.sent[1].layout.boxes[tensor][0]

    def flip() -> None:
        box.view(world.engine.sent[1].parameters)[-1:, -1:].view(torch.uint8)[..., :1].bitwise_xor_(bit)

    after_pull(world.ends[1], flip, monkeypatch)
    with pytest.raises(WeightSyncFailed, match=f"does not hold version 1: {tensor} differs; first at rows"):
        world.sync.publish(version=1)


@pytest.mark.thorough
def test_a_weight_that_changes_after_it_was_quantised_is_noticed() -> None:
    ranks = Ranks(shards(MODEL), EngineFormat.FP8_BLOCK, version=0)
    layout, parameters = ranks.ranks[0]
    (sent,) = ranks.sent
    sent.require_current(0)
    layout.boxes[NAME][0].view(parameters)[5, 7] += 3
    with pytest.raises(WeightsDrifted, match=f"rank 0 sends engines {NAME} in FP8, and no longer holds the weight"):
        sent.require_current(0)
    sent.update()
    sent.require_current(0)


def test_a_rank_whose_part_cuts_blocks_refuses() -> None:
    def load(held: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
        held["p"].copy_(checkpoint["a.q_proj.weight"][192:])

    weights = {"p": torch.zeros(192, 128)}
    layout = record(load, weights, {"a.q_proj.weight": (384, 128)})
    rule = (
        r"holds rows 192..383, columns 0..127 of a.q_proj.weight, \[384, 128\], which are not whole blocks of 128 x 128"
    )
    with pytest.raises(WeightSyncFailed, match=rule):
        QuantizedWeights(layout, weights, EngineFormat.FP8_BLOCK)


def test_a_trainer_that_does_not_quantise_is_refused() -> None:
    name = "a.q_proj.weight"

    def whole(held: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
        held[name].copy_(checkpoint[name])

    def end(dtype: torch.dtype) -> tuple[MemoryLayout, dict[str, Tensor]]:
        weights = {name: torch.zeros(128, 128).to(dtype)}
        return record(whole, weights, {name: (128, 128)}), weights

    sources = LocalSources([WeightSource(*end(torch.bfloat16))])
    engines = LocalDestinations([[destination(*end(torch.float8_e4m3fn), dtype=torch.bfloat16)]])
    with pytest.raises(
        WeightSyncFailed, match="sends a.q_proj.weight as torch.bfloat16, but engines hold it as torch.fl"
    ):
        WeightSync(sources, engines).connect()


def test_parts_keep_their_places_when_a_matrix_is_in_several() -> None:
    name = "a.q_proj.weight"
    weights = {"p": torch.arange(4 * 128 * 128, dtype=torch.float32).view(512, 128) - 30000}
    boxes = (Box(name, 0, 128, 0, 128, "p", 128 * 128, 128, 1), Box(name, 256, 128, 0, 128, "p", 0, 128, 1))

    def load(held: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
        held["p"].copy_(checkpoint[name])

    whole = record(load, weights, {name: (512, 128)})
    layout = MemoryLayout(boxes={name: boxes}, tensors=whole.tensors, parameters=whole.parameters)
    sent = QuantizedWeights(layout, weights, EngineFormat.FP8_BLOCK)
    assert [box.region[:2] for box in sent.layout.boxes[name + SCALE]] == [(0, 1), (2, 1)]
    for box, rows in zip(sent.layout.boxes[name], (slice(128, 256), slice(0, 128)), strict=True):
        assert same(box.view(sent.parameters), Fp8((128, 128)).quantize(weights["p"][rows].bfloat16())[0])
