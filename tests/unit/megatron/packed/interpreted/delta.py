"""flash-linear-attention's kernels and ours by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import builtins
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from rlframe.megatron.packed import delta_gradients, delta_kernels, gated_delta_rule

# Shorter than the convolution, one token, around the end of a chunk, and more than a chunk.
LENGTHS = [2, 64, 1, 67]
TOKENS, KEY_HEADS, HEADS, KEYS, VALUES = sum(LENGTHS), 2, 4, 12, 8


def numbers(*bounds: Any) -> Iterator[Any]:
    """`range`, of Triton's numbers: the interpreter gives those of Python, which have no `to`."""
    return (tl.full((), number, tl.int64) for number in builtins.range(*(int(bound) for bound in bounds)))


@pytest.fixture(autouse=True)
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """One configuration of each kernel, as there is no device to time others on; and `numbers`."""
    delta_kernels.load()
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for kernel in list(vars(module).values()):
                while hasattr(kernel, "fn"):
                    if isinstance(kernel, Autotuner):
                        monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
                    kernel = kernel.fn
    monkeypatch.setattr(sys.modules["fla.ops.common.chunk_delta_h"], "range", numbers, raising=False)


def inputs() -> list[Tensor]:
    """Queries, keys, values, decays and rates, which want gradients. States keep about half after ten tokens."""
    generator = torch.Generator().manual_seed(3)
    heads = ((KEY_HEADS, KEYS), (KEY_HEADS, KEYS), (HEADS, VALUES))
    query, key, value = (torch.randn(TOKENS, *shape, generator=generator) for shape in heads)
    decay, rate = torch.rand(2, TOKENS, HEADS, generator=generator)
    return [part.requires_grad_() for part in (query, key, value, -0.15 * decay, rate)]


def bounds() -> Tensor:
    """[R + 1] as Megatron has them."""
    return F.pad(torch.cumsum(torch.tensor(LENGTHS), 0), (1, 0)).to(torch.int32)


@pytest.mark.parametrize("ours", [True, False], ids=["our gradients", "their gradients"])
def test_the_rule_is_that_of_plain_torch(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_gradients.RlframeBackend, "is_available", classmethod(lambda cls: ours))
    called: list[int] = []
    gradients = delta_gradients.gradients
    monkeypatch.setattr(delta_gradients, "gradients", lambda **arguments: called.append(1) or gradients(**arguments))
    parts, kernels = inputs(), delta_kernels.load()
    assert kernels is not None
    found, expected = (rule(*parts, bounds()) for rule in (kernels.gated_delta_rule, gated_delta_rule.gated_delta_rule))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
    mine, theirs = (torch.autograd.grad((output * weights).sum(), parts) for output in (found, expected))
    for name, one, other in zip(("query", "key", "value", "decay", "rate"), mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert len(called) == ours


def test_the_convolution_is_that_of_plain_torch() -> None:
    generator = torch.Generator().manual_seed(5)
    values, weight = torch.randn(TOKENS, 6, generator=generator), torch.randn(6, 4, generator=generator)
    parts, kernels = [values.requires_grad_(), weight.requires_grad_()], delta_kernels.load()
    assert kernels is not None
    found, expected = (rule(*parts, bounds()) for rule in (kernels.convolve, gated_delta_rule.convolve))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    mine, theirs = (torch.autograd.grad(output.square().sum(), parts) for output in (found, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_the_gated_norm_is_that_of_plain_torch() -> None:
    generator = torch.Generator().manual_seed(6)
    output, gate = torch.randn(2, TOKENS, HEADS, VALUES, generator=generator).unbind()
    weight, kernels = torch.randn(VALUES, generator=generator), delta_kernels.load()
    assert kernels is not None
    parts = [part.requires_grad_() for part in (output, gate, weight)]
    found, expected = (norm(*parts, 0.01) for norm in (kernels.gated_norm, gated_delta_rule.gated_norm))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    mine, theirs = (torch.autograd.grad(normed.square().sum(), parts) for normed in (found, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
