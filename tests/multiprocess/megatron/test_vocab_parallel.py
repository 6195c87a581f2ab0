"""Logprobs and entropy over a vocabulary split in two equal those over the whole."""

import pytest
import torch

from tests.multiprocess.distributed import run_distributed

NUM_TOKENS, VOCAB_SIZE = 11, 20
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def compute(rank: int, init_method: str, world_size: int, widths: list[int]) -> list[Result]:
    """Logprobs, entropy and gradient of this rank's slice, for each padded width of the vocabulary."""
    import torch.distributed as dist

    from rlframe.megatron.vocab import vocab_parallel

    # Several chunks, and so several reductions, per call.
    vocab_parallel.CHUNK_ELEMENTS = 45
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    generator = torch.Generator().manual_seed(2)
    whole = 3 * torch.randn(NUM_TOKENS, max(widths), generator=generator)
    whole[:, VOCAB_SIZE:] = 40.0
    targets = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    targets[:3] = torch.tensor([0, 9, VOCAB_SIZE - 1])
    results = []
    for width in widths:
        logits = whole[:, :width].chunk(world_size, dim=1)[rank].clone().requires_grad_()
        logprobs, entropy = vocab_parallel.logprobs_and_entropy(
            logits, targets, temperature=0.9, vocab_size=VOCAB_SIZE, group=dist.group.WORLD
        )
        (torch.arange(NUM_TOKENS) * logprobs + 0.5 * entropy).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), logits.grad))
    dist.barrier()
    dist.destroy_process_group()
    return results


# Halves; 2 columns of padding on rank 1; padding all of rank 1's 22 columns, and 2 of rank 0's.
@pytest.mark.parametrize("width", [20, 22, 44])
def test_two_ranks_equal_one(width: int, ranks: list[list[list[Result]]]) -> None:
    (whole,), halves = ranks
    index = [20, 22, 44].index(width)
    logprobs, entropy, gradient = whole[index]
    for rank in halves:
        torch.testing.assert_close(rank[index][0], logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rank[index][1], entropy, atol=1e-5, rtol=1e-5)
        assert torch.equal(rank[index][0], halves[0][index][0]), "every rank must go on with the same numbers"
    joined = torch.cat([rank[index][2] for rank in halves], dim=1)
    torch.testing.assert_close(joined, gradient, atol=1e-5, rtol=1e-4)
    assert not joined[:, VOCAB_SIZE:].any() and joined[:, :VOCAB_SIZE].any(dim=1).all()


@pytest.fixture(scope="module")
def ranks() -> list[list[list[Result]]]:
    """What one rank, and what two ranks have, for each width."""
    return [run_distributed(compute, world_size, world_size, [20, 22, 44]) for world_size in (1, 2)]
