"""flash-linear-attention's kernels beside plain PyTorch at the dimensions of Qwen3.5, on one GPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.megatron.packed import delta_kernels, gated_delta_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(delta_kernels.load() is None, reason="fla-core is not installed"),
]
# One token, around a chunk, and more than one block of many chunks.
LENGTHS = [1, 63, 64, 65, 700, 1155]
TOKENS, KEY_HEADS, HEADS, WIDTH = sum(LENGTHS), 16, 32, 128
# bfloat16 has 8 bits; products of float32 are computed in TF32, which has 11. A wrong gradient is off by half of it.
LIMITS = {torch.bfloat16: 0.02, torch.float32: 0.005}


def bounds() -> Tensor:
    """[R + 1] as Megatron has them."""
    return F.pad(torch.cumsum(torch.tensor(LENGTHS), 0), (1, 0)).to("cuda", torch.int32)


def close(found: Tensor, expected: Tensor, limit: float, name: str) -> None:
    """Fails if the difference is not small beside what is expected, by length of the vectors."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < limit, f"{name}: {error:.5f}"


def compare(function: Callable[..., Tensor], parts: list[Tensor], names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares outputs and gradients with kernels with those of the same numbers in float32 without."""
    limit = LIMITS[parts[0].dtype]
    mine = [part.detach().requires_grad_() for part in parts]
    found = function(*mine)
    weights = torch.randn(found.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    (found.float() * weights).sum().backward()
    monkeypatch.setattr(gated_delta_rule, "_kernels", lambda tensor: None)
    theirs = [part.detach().float().requires_grad_() for part in parts]
    expected = function(*theirs)
    (expected * weights).sum().backward()
    close(found, expected, limit, "output")
    for name, one, other in zip(names.split(), mine, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        close(one.grad, other.grad, limit, name)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_rule_is_that_of_plain_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = ((KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH), (HEADS, WIDTH))
    query, key, value = (torch.randn(TOKENS, *shape, device="cuda", generator=generator).to(dtype) for shape in shapes)
    decay, rate = torch.rand(2, TOKENS, HEADS, device="cuda", generator=generator)
    parts = [query, key, value, -0.15 * decay, rate.to(dtype)]
    compare(
        lambda *each: gated_delta_rule.gated_delta_rule(*each, bounds()),
        parts, "query key value decay rate", monkeypatch,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_convolution_and_norm_are_those_of_plain_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    values, weight = (torch.randn(*shape, device="cuda", generator=generator) for shape in ((TOKENS, 512), (512, 4)))
    with monkeypatch.context() as patch:
        parts = [values.to(dtype), weight.to(dtype)]
        compare(lambda *each: gated_delta_rule.convolve(*each, bounds()), parts, "values weight", patch)
    output, gate = torch.randn(2, TOKENS, HEADS, WIDTH, device="cuda", generator=generator).to(dtype)
    scale = torch.randn(WIDTH, device="cuda", generator=generator).to(dtype)
    parts = [output, gate, scale]
    compare(lambda *each: gated_delta_rule.gated_norm(*each, 1e-6), parts, "output gate weight", monkeypatch)
