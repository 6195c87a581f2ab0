"""Memory of a sleeping policy comes back in whole blocks of torch's CUDA allocator, with what was in it."""

from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframe.megatron.memory import pinned
from rlframe.megatron.worker.offload import SleepingMemory, whole_blocks

MIB = 1 << 20
ELEMENTS = 3 * MIB + 5


def test_large_tensors_fill_their_blocks_and_small_ones_stay():
    # Qwen3-4B's gradients, 4,022,468,096 of 4 bytes, are 7,672.25 blocks of 2 MiB: 1.5 MiB were left to other tensors.
    assert whole_blocks(4_022_468_096 * 4) == 7673 * 2 * MIB
    assert [whole_blocks(size) for size in (12 * MIB, 12 * MIB + 1, 10 * MIB - 1, 4)] == [
        12 * MIB,
        14 * MIB,
        10 * MIB - 1,
        4,
    ]


class Policy:
    """One weight with its gradient, and Adam."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, elements: int, *, moves: bool = True):
        # As the platform of ranks on a CPU has it.
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        generator = torch.Generator().manual_seed(0)
        self.main = torch.nn.Parameter(torch.randn(elements, generator=generator).to(dtype))
        self.adam = torch.optim.Adam([self.main])
        self.gradients = torch.ones(elements)
        chunk: Any = SimpleNamespace(
            parameters=list, buffers=[SimpleNamespace(grad_data=self.gradients)], expert_parallel_buffers=[]
        )
        model: Any = SimpleNamespace(chunks=[chunk], parameters={"weight": torch.zeros(1)})
        optimizer: Any = SimpleNamespace(optimizer=self.adam)
        self.sleeping = SleepingMemory(model, optimizer, moments=dtype if moves else None)

    def step(self) -> None:
        self.main.grad = torch.ones_like(self.main)
        self.adam.step()


def test_what_will_sleep_has_whole_blocks_from_the_start_and_its_values(monkeypatch: pytest.MonkeyPatch):
    policy = Policy(monkeypatch, torch.float32, ELEMENTS)
    assert policy.main.untyped_storage().nbytes() == policy.gradients.untyped_storage().nbytes() == 14 * MIB
    assert torch.equal(policy.main, torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)))


def test_a_start_does_not_wait_for_host_memory_of_moments(monkeypatch: pytest.MonkeyPatch):
    may_go, begun, make = Event(), count(), pinned.host_memory

    def slow(size: int, *, pinned: bool) -> torch.Tensor:
        # 12 MiB and 20 bytes of main weights lie in the first 13 pieces of 1 MiB.
        assert next(begun) < 13 or may_go.wait(timeout=60)
        return make(size, pinned=pinned)

    for name, value in {"PIECE_BYTES": MIB, "MOST_THREADS": 1, "host_memory": slow}.items():
        monkeypatch.setattr(pinned, name, value)
    policy = Policy(monkeypatch, torch.float32, ELEMENTS)
    may_go.set()
    policy.step()
    assert policy.sleeping.sleep().kept_bytes == policy.sleeping.host_bytes


def test_what_slept_is_back_in_whole_blocks_however_often(monkeypatch: pytest.MonkeyPatch):
    policy = Policy(monkeypatch, torch.float32, ELEMENTS)
    policy.step()
    main, moments = policy.main, policy.adam.state[policy.main]
    expected = {key: value.clone() for key, value in moments.items()} | {"main": main.detach().clone()}
    for _ in range(2):
        moved = policy.sleeping.sleep()
        assert moved.kept_bytes >= 3 * 4 * ELEMENTS
        assert main.untyped_storage().nbytes() == policy.gradients.untyped_storage().nbytes() == 0
        policy.sleeping.wake()
        found = dict(moments) | {"main": main}
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        sizes = {each.untyped_storage().nbytes() for each in (main, policy.gradients, moments["exp_avg"])}
        assert sizes == {14 * MIB}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_memory_is_what_sleeps_take_and_no_more(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    policy = Policy(monkeypatch, dtype, elements=1000)
    begun = policy.sleeping.host_bytes
    policy.step()
    assert begun == 3 * dtype.itemsize * 1000 == policy.sleeping.sleep().kept_bytes == policy.sleeping.host_bytes


def test_a_policy_that_releases_memory_gives_gradients_back_and_copies_nothing(monkeypatch: pytest.MonkeyPatch):
    policy = Policy(monkeypatch, torch.float32, ELEMENTS, moves=False)
    policy.step()
    main = policy.main.detach().clone()
    for _ in range(2):
        moved = policy.sleeping.sleep()
        assert moved.dropped_bytes >= 4 * ELEMENTS and moved.kept_bytes == policy.sleeping.host_bytes == 0
        assert policy.gradients.untyped_storage().nbytes() == 0 and torch.equal(policy.main, main)
        policy.sleeping.wake()
        assert policy.gradients.untyped_storage().nbytes() == 14 * MIB
