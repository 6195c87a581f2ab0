"""The GPU's divergence and its gradient by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import pytest
import torch
from torch import Tensor

from rlframe.megatron.vocab import divergence, divergence_kernels

NUM_TOKENS, WIDTH = 5, 37
CELLS = [(0.0, 30), (0.1, 30), (0.5, 37), (0.5, 0), (1.0, 30)]
"""Betas and columns that are not padding."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_kernels, "BLOCK", 16)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of both models, in rows further apart than they are wide, and their normalizers."""
    generator = torch.Generator().manual_seed(3)
    both = [(6 * torch.randn(NUM_TOKENS, WIDTH + 3, generator=generator)).bfloat16().to(dtype) for _ in range(2)]
    # One token agrees, and of one the student is certain.
    both[0][1] = both[1][1]
    both[0][2, 5] = 300.0
    # Beside these what is not read, and so 0, would have all the mass.
    for each in both:
        each[3] -= 40
    student, teacher = (each[:, :WIDTH] for each in both)
    return student, teacher, torch.stack([torch.logsumexp(each.float() / 0.7, 1) for each in (student, teacher)])


@pytest.mark.parametrize(("beta", "valid"), CELLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_are_those_of_torch(dtype: torch.dtype, valid: int, beta: float) -> None:
    arguments = (*inputs(dtype), beta, 0.7, valid)
    torch.testing.assert_close(divergence_kernels.sums(*arguments), divergence.sums(*arguments), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("beta", "valid"), CELLS)
@pytest.mark.parametrize("in_place", [True, False])
def test_gradients_are_those_of_torch(in_place: bool, valid: int, beta: float) -> None:
    results = []
    for module in (divergence, divergence_kernels):
        student, teacher, normalizers = inputs(torch.float32)
        teacher = teacher.contiguous()
        out = teacher if in_place else torch.full_like(student, torch.nan)
        kls, grad = torch.linspace(0, 1, NUM_TOKENS), torch.linspace(-1, 2, NUM_TOKENS)
        module.gradient(student, teacher, normalizers, kls, grad, out, beta, 0.7, valid)
        results.append(out)
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
