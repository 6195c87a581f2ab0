"""Sliding windows and sinks against the softmax spelled out."""

import pytest
import torch

from rlframe.megatron.cpu.attention_masks import masked_attention


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_equals_the_softmax_spelled_out(window: int | None, with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 4, 7, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 5)}
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes.values()]
    sinks = torch.randn(4, generator=generator, requires_grad=True)
    actual = masked_attention(*inputs, scale=0.3, window=window, sinks=sinks if with_sinks else None)

    query, key, value = inputs
    scores = 0.3 * torch.einsum("shid,shjd->shij", query, key.repeat_interleave(2, 1))
    weights = torch.zeros_like(scores)
    for position in range(7):
        # Position i sees itself and the window - 1 before it.
        first = 0 if window is None else max(0, position - window + 1)
        seen = scores[:, :, position, first : position + 1].exp()
        total = seen.sum(-1, keepdim=True)
        if with_sinks:
            total = total + sinks[None, :, None].exp()
        weights[:, :, position, first : position + 1] = seen / total
    expected = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(actual, expected)

    wanted = [*inputs, sinks] if with_sinks else inputs
    upstream = torch.randn(expected.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad(actual, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_sink_takes_its_share() -> None:
    # One key with logit 0 and one sink with logit ln 3: weights 1/4 and 3/4, so a value of 8 becomes 2.
    ones = torch.zeros(1, 1, 1, 1)
    sink = torch.tensor([3.0]).log()
    out = masked_attention(ones, ones, torch.full((1, 1, 1, 1), 8.0), scale=1.0, window=None, sinks=sink)
    assert out.item() == pytest.approx(2.0)
