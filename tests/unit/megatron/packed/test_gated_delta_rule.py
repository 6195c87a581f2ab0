"""The gated delta rule and its convolution over packed sequences, beside one token after the other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.megatron.packed.gated_delta_rule import CHUNK, Chunks, convolve, gated_delta_rule

# Shorter than the convolution, one token, around the ends of a chunk, and several chunks; the longest in the middle.
LENGTHS = [2, CHUNK, 1, 2 * CHUNK + 3, 3, CHUNK + 1, CHUNK - 1]
TOKENS, HEADS, KEYS, VALUES = sum(LENGTHS), 3, 5, 4


def bounds() -> Tensor:
    """[R + 1] as Megatron has them."""
    return F.pad(torch.cumsum(torch.tensor(LENGTHS), 0), (1, 0)).to(torch.int32)


def inputs() -> list[Tensor]:
    """Queries, keys, values, decays and rates, which want gradients. States keep about half after ten tokens."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(TOKENS, HEADS, width, generator=generator) for width in (KEYS, KEYS, VALUES))
    decay, rate = torch.rand(2, TOKENS, HEADS, generator=generator)
    return [part.requires_grad_() for part in (query, key, value, -0.15 * decay, rate)]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """The rule of one sequence, in float64."""
    query, key, value, decay, rate = (part.double() for part in (query, key, value, decay, rate))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    state = torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64)
    outputs = []
    for token in range(len(query)):
        state = state * decay[token, :, None, None].exp()
        known = torch.einsum("hkv,hk->hv", state, key[token])
        state = state + torch.einsum("hk,hv->hkv", key[token], rate[token, :, None] * (value[token] - known))
        outputs.append(torch.einsum("hkv,hk->hv", state, query[token]) / KEYS**0.5)
    return torch.stack(outputs)


def test_chunks_give_the_outputs_and_gradients_of_single_tokens_of_single_sequences() -> None:
    parts = inputs()
    found = gated_delta_rule(*parts, bounds())
    expected = torch.cat([one_by_one(*rows) for rows in zip(*(part.split(LENGTHS) for part in parts), strict=True)])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
    ours = torch.autograd.grad((found * weights).sum(), parts)
    theirs = torch.autograd.grad((expected * weights).sum(), parts)
    for name, one, other in zip(("query", "key", "value", "decay", "rate"), ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_a_state_that_is_forgotten_at_once_gives_no_infinite_number() -> None:
    query, key, value, _, rate = inputs()
    decay = torch.full((TOKENS, HEADS), -80.0, requires_grad=True)
    output = gated_delta_rule(query, key, value, decay, rate, bounds())
    gradients = torch.autograd.grad(output.square().sum(), (query, key, value, decay, rate))
    assert all(part.isfinite().all() for part in (output, *gradients))


def test_no_sequence_sees_another_one() -> None:
    query, key, value, decay, rate = inputs()
    alone = gated_delta_rule(query, key, value, decay, rate, bounds())
    first = slice(0, LENGTHS[0])
    with torch.no_grad():
        value[first] += 1
    changed = (gated_delta_rule(query, key, value, decay, rate, bounds()) != alone).flatten(1).any(1)
    assert changed[first].all() and not changed[LENGTHS[0] :].any()


def test_chunks_of_longer_sequences_come_first() -> None:
    chunks = Chunks.of(torch.tensor([0, 3, 3 + CHUNK + 1]))
    assert chunks.counts == [2, 1]
    assert chunks.rows[:, 0].tolist() == [3, 0, 3 + CHUNK]
    assert chunks.present.sum(1).tolist() == [CHUNK, 3, 1]


def test_a_key_head_serves_consecutive_value_heads() -> None:
    query, key, value, decay, rate = inputs()
    heads = [0, 0, 1, 1]
    value, decay, rate = (part[:, [0, 1, 2, 0]] for part in (value, decay, rate))
    expected = gated_delta_rule(query[:, heads], key[:, heads], value, decay, rate, bounds())
    torch.testing.assert_close(gated_delta_rule(query[:, :2], key[:, :2], value, decay, rate, bounds()), expected)


def test_the_convolution_is_that_of_each_sequence_behind_zeros() -> None:
    generator = torch.Generator().manual_seed(5)
    values, weight = torch.randn(TOKENS, 6, generator=generator), torch.randn(6, 4, generator=generator)
    expected = [
        sum(F.pad(rows, (0, 0, shift, 0))[: len(rows)] * weight[:, 3 - shift] for shift in range(4))
        for rows in values.split(LENGTHS)
    ]
    found = convolve(values, weight, bounds())
    torch.testing.assert_close(found, F.silu(torch.cat(expected)), atol=1e-5, rtol=1e-5)
