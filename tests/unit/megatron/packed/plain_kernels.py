"""The calls of split attention, and attention without sharing, written as they are defined."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.megatron.packed.shared_prompts import SharedPrompts
from rlframe.megatron.packed.split_bounds import Call


class PlainKernels:
    """Computes each sequence of a call by itself, in float32 at least. Rows of no sequence are no numbers, as on a GPU
    they may be."""

    def __init__(self, scale: float):
        self.scale = scale
        self.calls: list[Call] = []

    def takes(self, query: Tensor) -> bool:
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
        self.calls.append(call)
        dtype = query.dtype
        query, key, value = (wide(each) for each in (query, key, value))
        output, lse = torch.full_like(query, torch.nan), query.new_full((*query.shape[:2], 1), torch.nan)
        for own, seen in sequences(call):
            scores = self.scores(query[own], key[seen], causal=call.causal)
            sums = scores.logsumexp(-1)
            probabilities = (scores - sums[..., None]).exp()
            output[own] = torch.einsum("hqk,khd->qhd", probabilities, repeated(value[seen], query))
            lse[own] = sums.T[..., None]
        return output.to(dtype), lse, [torch.tensor([len(self.calls)])]

    def backward(
        self,
        grad: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        lse: Tensor,
        rest: list[Tensor],
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (number,) = rest
        assert self.calls[int(number) - 1] is call, "each call has its own tensors again"
        dtype = grad.dtype
        grad, output, query, key, value = (wide(each) for each in (grad, output, *tensors))
        grads = tuple(torch.full_like(each, torch.nan) for each in (query, key, value))
        for own, seen in sequences(call):
            scores = self.scores(query[own], key[seen], causal=call.causal)
            probabilities = (scores - lse[own].permute(1, 0, 2)).exp()
            through = torch.einsum("qhd,khd->hqk", grad[own], repeated(value[seen], query))
            mean = (grad[own] * output[own]).sum(-1).T[..., None]
            pulled = probabilities * (through - mean) * self.scale
            grads[0][own] = torch.einsum("hqk,khd->qhd", pulled, repeated(key[seen], query))
            grads[1][seen] = gathered(torch.einsum("hqk,qhd->khd", pulled, query[own]), key)
            grads[2][seen] = gathered(torch.einsum("hqk,qhd->khd", probabilities, grad[own]), value)
        return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)

    def scores(self, query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
        """[heads, Q, K]"""
        scores = torch.einsum("qhd,khd->hqk", query, repeated(key, query)) * self.scale
        if not causal:
            return scores
        return scores.masked_fill(torch.ones(len(query), len(key)).triu(1).bool(), -torch.inf)


def wide(values: Tensor) -> Tensor:
    """In float32, or what they are if they have more digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sequences(call: Call) -> Iterator[tuple[slice, slice]]:
    """The rows of queries and keys of each sequence of a call."""
    parts = []
    for bounds, firsts in ((call.queries, call.first_queries), (call.keys, call.first_keys)):
        sizes = bounds.diff().tolist()
        parts.append([slice(first, first + size) for first, size in zip(firsts.tolist()[:-1], sizes, strict=True)])
    assert max(part.stop - part.start for part in parts[0]) == call.most_queries
    assert max(part.stop - part.start for part in parts[1]) == call.most_keys
    return zip(*parts, strict=True)


def repeated(values: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    return values.repeat_interleave(query.shape[1] // values.shape[1], 1)


def gathered(values: Tensor, like: Tensor) -> Tensor:
    """Gradients of keys or values from those for each head of the queries."""
    return values.unflatten(1, (like.shape[1], -1)).sum(2)


def apart(query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts) -> Tensor:
    """Attention of each sequence computed by itself."""
    bounds, key_bounds = shared.bounds.cu_seqlens_q, shared.bounds.cu_seqlens_kv
    outputs = []
    for own, seen in zip(bounds.diff().tolist(), shared.keys.split(key_bounds.diff().tolist()), strict=True):
        first = sum(len(each) for each in outputs)
        visible = torch.ones(own, len(seen), device=query.device).tril(len(seen) - own).bool()
        parts = (each.transpose(0, 1)[None] for each in (query[first : first + own], key[seen], value[seen]))
        outputs.append(F.scaled_dot_product_attention(*parts, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outputs)
