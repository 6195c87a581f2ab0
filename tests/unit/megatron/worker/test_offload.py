"""Memory of a sleeping policy comes back in whole blocks of torch's CUDA allocator, with what was in it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframe.megatron.worker.offload import SleepingMemory, whole_blocks

MIB = 1 << 20


def test_large_tensors_fill_their_blocks_and_small_ones_stay():
    # Qwen3-4B's gradients, 4,022,468,096 of 4 bytes, are 7,672.25 blocks of 2 MiB: 1.5 MiB were left to other tensors.
    assert whole_blocks(4_022_468_096 * 4) == 7673 * 2 * MIB
    assert [whole_blocks(size) for size in (12 * MIB, 12 * MIB + 1, 10 * MIB - 1, 4)] == [
        12 * MIB,
        14 * MIB,
        10 * MIB - 1,
        4,
    ]


def test_what_slept_is_back_in_whole_blocks_however_often(monkeypatch: pytest.MonkeyPatch):
    # As the platform of ranks on a CPU has it.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    elements = 3 * MIB + 5
    parameter = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    adam = torch.optim.Adam([torch.nn.Parameter(parameter.clone())])
    gradients = torch.ones(elements)
    chunk: Any = SimpleNamespace(
        parameters=list, buffers=[SimpleNamespace(grad_data=gradients)], expert_parallel_buffers=[]
    )
    model: Any = SimpleNamespace(chunks=[chunk], parameters={"weight": torch.zeros(1)})
    optimizer: Any = SimpleNamespace(optimizer=adam)
    sleeping = SleepingMemory(model, optimizer)
    (main,) = adam.param_groups[0]["params"]
    main.grad = torch.randn(elements)
    adam.step()
    expected = {key: value.clone() for key, value in adam.state[main].items()} | {"main": main.detach().clone()}
    for _ in range(2):
        moved = sleeping.sleep()
        assert moved.kept_bytes >= 3 * 4 * elements
        assert main.untyped_storage().nbytes() == gradients.untyped_storage().nbytes() == 0
        sleeping.wake()
        found = dict(adam.state[main]) | {"main": main}
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        sizes = {each.untyped_storage().nbytes() for each in (main, gradients, adam.state[main]["exp_avg"])}
        assert sizes == {14 * MIB}
