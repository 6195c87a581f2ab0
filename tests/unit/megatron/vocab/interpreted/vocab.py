"""The GPU's logprobs and gradients by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import pytest
import torch
from torch import Tensor

from rlframe.megatron.vocab import vocab_kernels, vocab_parallel

NUM_TOKENS, WIDTH = 5, 37
# One rank's slices: all of it, padding behind, nothing but padding, and a later slice with some targets elsewhere.
SLICES = [(0, 37), (0, 30), (0, 0), (20, 37)]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits that bfloat16 holds exactly, in rows further apart than they are wide, and targets."""
    generator = torch.Generator().manual_seed(3)
    wide = (6 * torch.randn(NUM_TOKENS, WIDTH + 3, generator=generator)).bfloat16().to(dtype)
    wide[1] = 1e-3 * wide[1]
    wide[2, 5] = 300.0
    return wide[:, :WIDTH], torch.tensor([0, 36, 20, 29, 50])


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("start", "valid"), SLICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_statistics_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, block: int, start: int, valid: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(vocab_kernels, "BLOCK", block)
    logits, targets = inputs(dtype)
    expected = vocab_parallel.statistics(logits, targets, 0.7, start, valid)
    actual = vocab_kernels.statistics(logits, targets, 0.7, start, valid)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("start", "valid"), SLICES)
def test_gradients_are_those_of_torch(start: int, valid: int, in_place: bool, with_entropy: bool) -> None:
    vocab_kernels.BLOCK = 16
    logits, targets = inputs(torch.float32)
    log_normalizer = torch.logsumexp(logits / 0.7, 1)
    of_logprobs = torch.linspace(-1, 2, NUM_TOKENS)
    of_entropy = torch.linspace(1, -1, NUM_TOKENS) if with_entropy else None
    results = []
    for module in (vocab_parallel, vocab_kernels):
        mine = logits.clone()
        out = mine if in_place else torch.full_like(mine, torch.nan)
        module.gradient(
            mine, targets, log_normalizer, torch.ones(NUM_TOKENS), of_logprobs, of_entropy, out, 0.7, start, valid
        )
        results.append(out)
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
