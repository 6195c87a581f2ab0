"""The GPU's queries, keys and values by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.megatron.model.layers import query_key_kernels
from rlframe.megatron.model.layers.query_key import TurnedHeads

ROWS, KEYS, SIZE, EPSILON = 5, 3, 8, 1e-6
Parts = tuple[Tensor, Tensor, Tensor]


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Su et al. 2021, arXiv 2104.09864, with the halves of a head as pairs: [T, h, D]."""
    first, second = heads.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def reference(mixed: Tensor, weights: tuple[Tensor, Tensor] | None, turns: tuple[Tensor, Tensor], group: int) -> Parts:
    """By torch, in float32, with the rounding between norm and rotation."""
    q, k, v = mixed.float().view(ROWS, KEYS, group + 2, SIZE).split([group, 1, 1], 2)
    q, k = q.flatten(1, 2), k.flatten(1, 2)
    if weights:
        q, k = (F.rms_norm(part, (SIZE,), weight, EPSILON) for part, weight in zip((q, k), weights, strict=True))
        q, k = (part + (part.to(mixed.dtype).float() - part).detach() for part in (q, k))
    return turned(q, *turns), turned(k, *turns), v.flatten(1, 2)


@pytest.mark.parametrize(
    ("group", "normed", "dtype", "held"),
    [(2, True, torch.float32, 4), (1, True, torch.bfloat16, 16), (4, False, torch.float32, 16)],
)
def test_values_and_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, group: int, normed: bool, dtype: torch.dtype, held: int
) -> None:
    monkeypatch.setattr(query_key_kernels, "HEADS", held)
    monkeypatch.setattr(query_key_kernels, "PROGRAMS", 2)
    generator = torch.Generator().manual_seed(3)
    mixed = (2 * torch.randn(ROWS, KEYS * (group + 2) * SIZE, generator=generator)).to(dtype)
    weights = tuple(1 + 0.5 * torch.randn(2, SIZE, generator=generator)) if normed else None
    angles = 7 * torch.rand(ROWS, SIZE // 2, generator=generator)
    turns = angles.cos(), angles.sin()
    ours = [mixed.clone().requires_grad_(), *(each.clone().to(dtype).requires_grad_() for each in weights or ())]
    theirs = [each.detach().float().requires_grad_() for each in ours]
    out = TurnedHeads.apply(ours[0][:, None], *(ours[1:] or (None, None)), turns, (KEYS, group, SIZE), EPSILON)
    assert [part.shape[:2] for part in out] == [(ROWS, 1)] * 3
    out = [part.squeeze(1) for part in out]
    expected = reference(theirs[0].to(dtype), (theirs[1], theirs[2]) if normed else None, turns, group)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02}
    for part, other in zip(out, expected, strict=True):
        assert part.dtype == dtype and part.is_contiguous()
        torch.testing.assert_close(part.float(), other, **close)
    grads = [torch.randn(part.shape, generator=generator).to(dtype) for part in out]
    torch.autograd.backward(out, grads)
    torch.autograd.backward(expected, [grad.float() for grad in grads])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.float(), other.grad, **close)


def test_no_rows_make_no_rows() -> None:
    heads, turns = query_key_kernels.Heads(KEYS, 2, SIZE), (torch.empty(0, SIZE // 2),) * 2
    mixed, weights = torch.empty(0, heads.count * SIZE), (torch.ones(SIZE),) * 2
    q, k, v = query_key_kernels.forward(mixed, weights, turns, heads, EPSILON)
    assert q.shape == (0, 2 * KEYS, SIZE) and k.shape == v.shape == (0, KEYS, SIZE)
    of_mixed, of_weights = query_key_kernels.backward((q, k, v), mixed, weights, turns, heads, EPSILON)
    assert of_mixed.shape == mixed.shape and of_weights is not None and not of_weights.any()
