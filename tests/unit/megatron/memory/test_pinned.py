"""Host memory in large pieces. Here CUDA is a list of what it was asked for; tests/gpu has the rest."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlframe.megatron.memory.pinned import copied, host_memory


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Stands in for CUDA: the bytes that are registered, by address."""
    found: dict[int, int] = {}

    def register(address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0 and address % 4096 == 0, "whole pages"
        found[address] = num_bytes
        return 0

    def unregister(address: int) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        assert any(start <= address < end for start, end in ranges), "the pages are still there"
        del found[address]

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return found


def test_pinned_memory_is_registered_as_long_as_it_is_used(registered: dict[int, int]) -> None:
    memory = host_memory(3 << 20, pinned=True)
    assert memory.dtype == torch.uint8 and memory.numel() == 3 << 20 and not memory.any()
    assert registered == {memory.data_ptr(): 3 << 20}
    memory.fill_(7)
    with torch.inference_mode():
        part = memory[1 << 20 :].view(torch.bfloat16)
    del memory
    gc.collect()
    assert len(registered) == 1 and part.numel() == 1 << 20, "a part of it is in use"
    del part
    gc.collect()
    assert not registered


def test_other_memory_is_torchs_own(registered: dict[int, int]) -> None:
    assert not host_memory(1 << 20, pinned=False).any()
    assert host_memory(0, pinned=True).numel() == 0
    assert not registered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_has_values_of_its_own(dtype: torch.dtype) -> None:
    values = torch.arange(6, dtype=dtype).view(2, 3)
    copy = copied(values)
    values.zero_()
    assert torch.equal(copy, torch.arange(6, dtype=dtype).view(2, 3))
    assert copied(torch.empty(0, dtype=dtype)).numel() == 0
