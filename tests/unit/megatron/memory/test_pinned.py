"""Host memory in large pieces. Here CUDA is a list of what it was asked for; tests/gpu has the rest."""

import gc
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from rlframe.megatron.memory import pinned
from rlframe.megatron.memory.pinned import Pieces, copied, host_memory


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


def test_pieces_grow_to_what_is_asked_for_and_are_registered_each(
    registered: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PIECE_BYTES", 1 << 20)
    pieces = Pieces(pinned=True)
    pieces.grow((2 << 20) + 5)
    assert [each.numel() for each in pieces.all()] == [1 << 20, 1 << 20, 5] and not any(map(torch.any, pieces.all()))
    pieces.grow(1 << 20)
    assert pieces.num_bytes == (2 << 20) + 5, "there is enough"
    pieces.grow(3 << 20)
    sizes = [each.numel() for each in pieces.all()]
    assert sum(sizes) == pieces.num_bytes == 3 << 20 and max(sizes) == 1 << 20
    assert registered == {each.data_ptr(): each.numel() for each in pieces.all()}


def test_growing_waits_for_nothing_and_a_failure_is_raised_where_a_piece_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_register = Event()

    def register(address: int, num_bytes: int, flags: int) -> int:
        assert may_register.wait(timeout=60)
        return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    # The real one asks CUDA what the status means.
    monkeypatch.setattr(torch.cuda, "CudaError", MemoryError)
    pieces = Pieces(pinned=True)
    pieces.grow(1 << 20)
    may_register.set()
    with pytest.raises(MemoryError, match="2"):
        pieces.all()
