"""Logprobs and entropy on one rank against torch, in values, gradients and memory. Two ranks: see multiprocess."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframe.megatron.vocab import vocab_parallel
from rlframe.megatron.vocab.vocab_parallel import logprobs_and_entropy

NUM_TOKENS, VOCAB_SIZE = 13, 29


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def logits_and_targets(width: int = VOCAB_SIZE, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Random logits in float64 and targets, the first and the last token of the vocabulary among them."""
    generator = torch.Generator().manual_seed(5)
    logits = scale * torch.randn(NUM_TOKENS, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    targets[0], targets[1] = 0, VOCAB_SIZE - 1
    return logits, targets


def plain(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same by torch's log_softmax."""
    table = torch.log_softmax(logits / temperature, dim=1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)


@pytest.mark.parametrize("chunk_elements", [1 << 24, 3 * VOCAB_SIZE + 5, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("padding", [0, 3])
def test_values_and_gradients_equal_torchs(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, chunk_elements: int, temperature: float, padding: int
) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    logits, targets = logits_and_targets(VOCAB_SIZE + padding)
    logits[:, VOCAB_SIZE:] = 50.0  # padding that would dominate every sum if it took part
    grad_logprobs, grad_entropy = torch.linspace(-1, 2, NUM_TOKENS), torch.linspace(3, -1, NUM_TOKENS)

    exact = logits[:, :VOCAB_SIZE].clone().requires_grad_()
    expected = plain(exact, targets, temperature)
    torch.autograd.backward(expected, (grad_logprobs.double(), grad_entropy.double()))

    ours = logits.float().requires_grad_()
    before = ours.detach().clone()
    actual = logprobs_and_entropy(ours, targets, temperature=temperature, vocab_size=VOCAB_SIZE, group=group)
    torch.autograd.backward(actual, (grad_logprobs, grad_entropy))

    for value, reference in zip(actual, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), reference.detach(), atol=2e-5, rtol=1e-5)
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad[:, :VOCAB_SIZE].double(), exact.grad, atol=2e-5, rtol=1e-4)
    assert not ours.grad[:, VOCAB_SIZE:].any()
    assert torch.equal(ours.detach(), before), "Megatron's own loss overwrites its logits; this must not"


def test_the_gradient_is_that_of_finite_differences(group: dist.ProcessGroup) -> None:
    # Central differences of the sum of both outputs in float64 arithmetic; ours has float32's precision.
    logits, targets = logits_and_targets(scale=1.0)
    ours = logits.float().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(ours, targets, temperature=0.8, vocab_size=VOCAB_SIZE, group=group)
    (2 * logprobs.sum() + 3 * entropy.sum()).backward()
    step, slopes = 1e-5, torch.zeros_like(logits)
    for index in range(logits.numel()):
        sides = []
        for sign in (1, -1):
            moved = logits.clone()
            moved.view(-1)[index] += sign * step
            logprobs, entropy = plain(moved, targets, 0.8)
            sides.append(2 * logprobs.sum() + 3 * entropy.sum())
        slopes.view(-1)[index] = (sides[0] - sides[1]) / (2 * step)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), slopes, atol=1e-5, rtol=1e-4)


def test_only_one_of_the_outputs_may_be_used(group: dist.ProcessGroup) -> None:
    logits, targets = logits_and_targets()
    exact = logits.clone().requires_grad_()
    plain(exact, targets, 1.0)[0].sum().backward()
    ours = logits.float().requires_grad_()
    logprobs_and_entropy(ours, targets, temperature=1.0, vocab_size=VOCAB_SIZE, group=group)[0].sum().backward()
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=1e-4)


def test_extreme_logits_stay_finite(group: dist.ProcessGroup) -> None:
    # exp(300) is infinite in float32. All mass on one token: entropy 0, the others' logprob their distance.
    logits = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    targets = torch.tensor([2])
    logprobs, entropy = logprobs_and_entropy(logits, targets, temperature=1.0, vocab_size=3, group=group)
    (logprobs + entropy).sum().backward()
    assert (logprobs.item(), entropy.item()) == (-600.0, 0.0)
    assert logits.grad is not None and logits.grad.tolist() == [[-1.0, 0.0, 1.0]]


def test_no_tokens_give_no_logprobs(group: dist.ProcessGroup) -> None:
    logits = torch.zeros(0, VOCAB_SIZE, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(
        logits, torch.zeros(0, dtype=torch.int64), temperature=1.0, vocab_size=VOCAB_SIZE, group=group
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert logits.grad is not None and logits.grad.shape == (0, VOCAB_SIZE)


class LargestFloat32(TorchDispatchMode):
    """Remembers how many elements the largest float32 tensor had that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
                self.largest = max(self.largest, leaf.numel())
        return result


def test_bfloat16_logits_are_never_copied_whole(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_elements = 4 * VOCAB_SIZE
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    logits, targets = logits_and_targets()
    exact = logits.bfloat16().double().requires_grad_()
    expected = plain(exact, targets, 0.7)
    (expected[0] + expected[1]).sum().backward()

    ours = logits.bfloat16().requires_grad_()
    with LargestFloat32() as made:
        actual = logprobs_and_entropy(ours, targets, temperature=0.7, vocab_size=VOCAB_SIZE, group=group)
        (actual[0] + actual[1]).sum().backward()
    assert NUM_TOKENS * VOCAB_SIZE > chunk_elements >= made.largest > NUM_TOKENS
    assert ours.grad is not None and exact.grad is not None and ours.grad.dtype == torch.bfloat16
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), reference.detach(), atol=2e-5, rtol=1e-5)
    # Computed in float32, rounded to bfloat16's 8 bits once.
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-5, rtol=2**-8)


def gradient(group: dist.ProcessGroup, *, reuse_logits: bool, entropy_factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of a hidden state that the logits are made of, that of the logits, and the logits' memory."""
    logits, targets = logits_and_targets()
    hidden = logits.float().requires_grad_()
    made = hidden * 1.0
    arrived = []
    made.register_hook(lambda grad: arrived.append(grad))
    logprobs, entropy = logprobs_and_entropy(
        made, targets, temperature=0.8, vocab_size=VOCAB_SIZE, group=group, reuse_logits=reuse_logits
    )
    loss = logprobs.sum() + entropy_factor * entropy.sum() if entropy_factor else logprobs.sum()
    loss.backward()
    assert hidden.grad is not None
    return hidden.grad, arrived[0], made.detach()


@pytest.mark.parametrize("entropy_factor", [0.0, 0.5])
def test_the_gradient_can_take_the_place_of_the_logits(group: dist.ProcessGroup, entropy_factor: float) -> None:
    kept, _, _ = gradient(group, reuse_logits=False, entropy_factor=entropy_factor)
    reused, arrived, logits = gradient(group, reuse_logits=True, entropy_factor=entropy_factor)
    assert torch.equal(kept, reused)
    assert arrived.data_ptr() == logits.data_ptr()


def test_an_operation_that_kept_logits_which_were_written_over_is_told(group: dist.ProcessGroup) -> None:
    logits, targets = logits_and_targets()
    capped = logits.float().requires_grad_().tanh()  # its backward needs its result
    logprobs, _ = logprobs_and_entropy(
        capped, targets, temperature=1.0, vocab_size=VOCAB_SIZE, group=group, reuse_logits=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_chunks_suit_a_cores_cache_or_are_few_enough_to_launch() -> None:
    # 16,384 rows of 151,936 logits: on a GPU each operation of a chunk is a launch.
    for on_gpu, largest in ((False, 1 << 18), (True, 1 << 26)):
        found = vocab_parallel.chunks(16384, 151_936, on_gpu=on_gpu)
        assert [found[0].start, found[-1].stop] == [0, 16384]
        assert all(before.stop == after.start for before, after in zip(found, found[1:], strict=False))
        assert all((rows.stop - rows.start) * 151_936 <= largest for rows in found)
        assert len(found) == (38 if on_gpu else 16384)
