"""Weights of a GPU that are held in host memory reach an engine on a GPU, while the trainer's have changed."""

import pytest
import torch

from rlframe.weight_sync.choice import Choice
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.connection import make_connection
from rlframe.weight_sync.endpoints import WeightDestination, WeightSource
from rlframe.weight_sync.hold import Hold
from rlframe.weight_sync.layout.memory import load_tensor
from rlframe.weight_sync.proof.digest import digest
from tests.unit.models.parameters import shards
from tests.unit.weight_sync.groups import LocalSources
from tests.unit.weight_sync.world import FAMILY, MODEL, rank

pytestmark = pytest.mark.gpu


def test_held_weights_of_a_gpu_arrive_bit_for_bit() -> None:
    device, tensors = torch.device("cuda"), FAMILY.tensors(MODEL)
    (shard,) = shards(MODEL)
    layout, parameters = rank(MODEL, shard, torch.float32)
    theirs, copied = rank(MODEL, shard, torch.bfloat16)
    parameters, copied = ({key: value.to(device) for key, value in each.items()} for each in (parameters, copied))
    for key, shape in tensors.items():
        load_tensor(layout, parameters, key, torch.randn(shape))
    source = WeightSource(layout, parameters)
    engine = WeightDestination(theirs, copied, tensors=tensors, dtype=torch.bfloat16, device=device)
    config, infos = WeightSyncConfig(), [engine.describe()]
    connection = make_connection([source.describe()], infos, [0], config, Choice("shm", False, "tested"), seed=5)
    published = {key: value.bfloat16() for key, value in parameters.items()}
    expected = digest(layout, parameters, dtypes=connection.dtypes, units=connection.units, seed=5)
    hold = Hold()
    hold.prepare([source.describe()], infos, [0], connection.dtypes)
    hold.take(LocalSources([source]), 1)
    for value in parameters.values():
        value.zero_()
    (link,) = hold.links(infos, [0], connection, config)
    engine.connect(link)
    received = engine.receive()
    assert dict(zip(theirs.tensors, received.digests.tolist(), strict=True)) == expected
    assert [key for key in copied if not torch.equal(copied[key], published[key])] == []
