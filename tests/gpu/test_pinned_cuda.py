"""Host memory that CUDA has registered: it is pinned, copies are exact, and its addresses may be used again."""

import pytest
import torch

from rlframe.megatron.memory import reference
from rlframe.megatron.memory.pinned import copied, host_memory

pytestmark = pytest.mark.gpu


def test_copies_into_pinned_memory_are_exact_and_its_place_can_be_pinned_again() -> None:
    values = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device="cuda")
    for _ in range(3):
        memory = host_memory(values.numel(), pinned=True)
        assert memory.is_pinned()
        memory.copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory, values.cpu())
        # The next one may get the same pages of address space.
        del memory


def test_a_copy_of_weights_is_pinned() -> None:
    weights = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    copy = copied(weights)
    assert copy.is_pinned() and torch.equal(copy, weights.cpu())


def test_a_reference_and_the_policy_exchange_weights_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small parts, of two number formats, whose last is shorter."""
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1 << 16)
    live = [
        torch.randn(size, device="cuda").to(dtype)
        for size, dtype in ((1 << 24, torch.bfloat16), (70_001, torch.float32))
    ]
    first = [each.clone() for each in live]
    weights = reference.ReferenceWeights(live)
    for step in range(3):
        for each in live:
            each.mul_(1.5).add_(step)
        trained = [each.clone() for each in live]
        with weights.active():
            assert all(torch.equal(*both) for both in zip(live, first, strict=True))
            assert all(torch.equal(*both) for both in zip(weights.kept, [each.cpu() for each in trained], strict=True))
        assert all(torch.equal(*both) for both in zip(live, trained, strict=True))
