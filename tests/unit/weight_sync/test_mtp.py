"""The head for multi-token prediction in a weight sync: an engine that drafts with it gets it and is proved to hold it
(https://github.com/vllm-project/vllm/issues/48296), an engine without it gets the rest."""

import pytest
import torch
from torch import Tensor

from rlframe.models.families.base import Architecture
from rlframe.models.families.glm4_moe import FAMILY
from rlframe.models.shards import shards_of_rank
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.channel import WeightSource, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.memory import MemoryLayout, clear_padding, load_tensor, record
from tests.unit.models.test_mtp import WITH_EXPERTS, head
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination

KEPT, ADDED = head("glm4_moe")
DROPPED = FAMILY.architecture(WITH_EXPERTS)
Rank = tuple[MemoryLayout, dict[str, Tensor]]


def ranks(a: Architecture, dtype: torch.dtype, *, tp: int = 1) -> list[Rank]:
    """Memory of all ranks of a side."""
    found = []
    for rank in range(tp):
        (shard,) = shards_of_rank(a, rank, tp=tp, etp=tp)
        held = {name: torch.zeros(shape, dtype=dtype) for name, shape in FAMILY.parameters(a, shard).items()}
        load = lambda ours, theirs, shard=shard: FAMILY.load(ours, theirs, a, shard)  # noqa: E731
        found.append((record(load, held, FAMILY.tensors(a)), held))
    return found


def fill(side: list[Rank], version: int) -> None:
    """Loads the weights of that version."""
    for layout, held in side:
        clear_padding(layout, held)
        for name, shape in layout.tensors.items():
            generator = torch.Generator().manual_seed(version * 1000 + sum(map(ord, name)))
            load_tensor(layout, held, name, torch.randn(shape, generator=generator))


def test_an_engine_that_drafts_gets_the_head_and_another_does_not() -> None:
    trainer = ranks(KEPT, torch.float32, tp=2)
    drafting, plain = ranks(KEPT, torch.bfloat16), ranks(DROPPED, torch.bfloat16)
    for side in (trainer, drafting, plain):
        fill(side, 0)
    engines = [[destination(*pair, dtype=torch.bfloat16) for pair in side] for side in (drafting, plain)]
    sync = WeightSync(
        LocalSources([WeightSource(*pair) for pair in trainer]), LocalDestinations(engines), WeightSyncConfig()
    )
    sync.connect()
    sync.calibrate(version=0)
    fill(trainer, 1)
    sync.publish(version=1)
    for side, a in ((drafting, KEPT), (plain, DROPPED)):
        expected = ranks(a, torch.bfloat16)
        fill(expected, 1)
        assert all(torch.equal(side[0][1][name], value) for name, value in expected[0][1].items())


def test_an_engine_with_a_stale_head_is_named() -> None:
    trainer, drafting = ranks(KEPT, torch.float32), ranks(KEPT, torch.bfloat16)
    fill(trainer, 0)
    fill(drafting, 0)
    stale = torch.randn(16, 32)
    drafting[0][1]["mtp_head.eh_proj.weight"].copy_(stale)
    engines = [[destination(*pair, dtype=torch.bfloat16) for pair in drafting]]
    sync = WeightSync(
        LocalSources([WeightSource(*pair) for pair in trainer]), LocalDestinations(engines), WeightSyncConfig()
    )
    sync.connect()
    with pytest.raises(WeightSyncFailed, match=r"engine 0 does not hold version 0: model.layers.2.eh_proj.weight"):
        sync.calibrate(version=0)
