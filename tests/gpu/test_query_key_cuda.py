"""The kernels of queries and keys at the sizes of real models, beside torch in float32 on the same GPU."""

import pytest
import torch

from rlframe.megatron.model.layers.query_key import TurnedHeads
from tests.unit.megatron.model.interpreted import query_key as small

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
FARTHEST = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""How far a result may be, relative to its norm: orders of summation, and bfloat16's 8 bits, which round once or
twice."""


@pytest.mark.parametrize(
    ("keys", "group", "size", "normed"),
    [(8, 2, 128, True), (4, 8, 128, True), (8, 4, 128, False), (2, 7, 64, False), (1, 1, 256, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, keys: int, group: int, size: int, normed: bool, dtype: torch.dtype
) -> None:
    rows = 3001
    for name, value in (("ROWS", rows), ("KEYS", keys), ("SIZE", size)):
        monkeypatch.setattr(small, name, value)
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    drawn = {"device": DEVICE, "generator": generator}
    mixed = torch.randn(rows, keys * (group + 2) * size, **drawn).to(dtype)
    weights = tuple((1 + 0.5 * torch.randn(2, size, **drawn)).to(dtype)) if normed else ()
    angles = 4000 * torch.rand(rows, size // 2, **drawn)
    turns = angles.cos(), angles.sin()
    ours = [each.clone().requires_grad_() for each in (mixed, *weights)]
    theirs = [each.float().requires_grad_() for each in (mixed, *weights)]
    out = TurnedHeads.apply(ours[0][:, None], *(ours[1:] or (None, None)), turns, (keys, group, size), small.EPSILON)
    expected = small.reference(theirs[0], (theirs[1], theirs[2]) if normed else None, turns, group)
    grads = [torch.randn(part.shape, **drawn).to(dtype) for part in out]
    torch.autograd.backward(out, grads)
    torch.autograd.backward(expected, [grad.squeeze(1).float() for grad in grads])
    found = [part.squeeze(1) for part in out] + [each.grad for each in ours]
    for part, other in zip(found, [*expected, *(each.grad for each in theirs)], strict=True):
        assert part is not None and other is not None and part.dtype == dtype
        distance = float((part.float() - other).norm() / other.norm())
        assert distance < FARTHEST[dtype], f"{distance:.1e}"
