"""The gated delta rule, the convolution before it and the norm after it, over packed sequences. No state passes from
one sequence to the next.

Source: Yang et al. 2024, arXiv 2412.06464, sections 3.1 and 3.3. A head has a state S [key dim, value dim], zero before
a sequence. A token with key k, value v, query q, decay a <= 0 and learning rate b does
    S = exp(a) S,  S = S + b k (v - S' k)',  o = S' q / sqrt(key dim),
' being transposition. A chunk of 64 tokens is computed at once, and the chunks of a sequence one after the other.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.megatron.packed import delta_kernels

CHUNK = 64
NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys, as in the kernels and in transformers."""


def convolve(values: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns [T, C] SiLU of the causal convolution of each channel over each sequence, before which all is zero.

    Args:
        values: [T, C].
        weight: [C, width].
        cu_seqlens: [R + 1] bounds of the sequences.
    """
    if kernels := _kernels(values):
        return kernels.convolve(values, weight, cu_seqlens)
    gap = weight.shape[-1] - 1
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    # Each sequence is moved behind `gap` rows of zeros.
    rows = torch.arange(len(values), device=values.device) + gap * (sequence + 1)
    spread = values.new_zeros(len(values) + gap * len(lengths), values.shape[1]).index_copy(0, rows, values)
    return F.silu(F.conv1d(spread.t()[None], weight[:, None], groups=len(weight))[0].t()[rows - gap])


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Returns [T, value heads, value dim] the output of each token. Queries and keys are brought to length 1 first.

    On CUDA it is flash-linear-attention's kernel if that is installed, else `chunked`.

    Args:
        query: [T, key heads, key dim], as key. Each serves as many consecutive value heads.
        value: [T, value heads, value dim].
        decay: [T, value heads] float32, at most 0.
        rate: [T, value heads] from 0 to 1.
        cu_seqlens: [R + 1] bounds of the sequences.
    """
    if kernels := _kernels(query):
        return kernels.gated_delta_rule(query, key, value, decay, rate, cu_seqlens)
    query, key = (part.repeat_interleave(value.shape[1] // key.shape[1], dim=1) for part in (query, key))
    return chunked(query, key, value, decay, rate, cu_seqlens)


def gated_norm(output: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns [T, value heads, value dim] each head normalised, times the weight, times SiLU of its gate."""
    if kernels := _kernels(output):
        return kernels.gated_norm(output, gate, weight, eps)
    normed = F.rms_norm(output.float(), (output.shape[-1],), None, eps).to(output.dtype)
    return (weight * normed * F.silu(gate.float())).to(output.dtype)


def _kernels(tensor: Tensor) -> delta_kernels.Kernels | None:
    return delta_kernels.load() if tensor.is_cuda else None


class Chunks(NamedTuple):
    """The chunks of packed sequences: first the first ones of all sequences, then the second ones, and so on. Longer
    sequences come first."""

    rows: Tensor
    """[chunks, CHUNK] row of each token among all tokens. Rows beyond a sequence repeat its last one."""
    present: Tensor
    """[chunks, CHUNK] False beyond the end of a sequence."""
    counts: list[int]
    """Number of first chunks, of second ones, and so on."""

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> "Chunks":
        """Returns the chunks of the sequences with these bounds."""
        bounds = cu_seqlens.tolist()
        sequences = sorted(zip(bounds, bounds[1:], strict=False), key=lambda pair: pair[0] - pair[1])
        steps = -(-(sequences[0][1] - sequences[0][0]) // CHUNK)
        pieces = [[(a + i * CHUNK, b) for a, b in sequences if a + i * CHUNK < b] for i in range(steps)]
        first, end = torch.tensor([piece for step in pieces for piece in step], device=cu_seqlens.device).T[..., None]
        rows = first + torch.arange(CHUNK, device=cu_seqlens.device)
        return cls(torch.minimum(rows, end - 1), rows < end, [len(step) for step in pieces])


def chunked(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns `gated_delta_rule` of as many key as value heads in plain PyTorch, computed in float32.

    In a chunk let D be the running sum of the decays. With w_i = b_i (v_i - S' k_i), S the state before token i, the
    state after it is exp(D_i) S_0 + sum over j <= i of exp(D_i - D_j) k_j w_j'. The w solve the triangular system
        w_i + b_i sum over j < i of exp(D_i - D_j) (k_i . k_j) w_j = b_i v_i - b_i exp(D_i) S_0' k_i,
    which is linear in S_0, so that it is solved for all chunks before their states are known.
    """
    chunks, dtype = Chunks.of(cu_seqlens), value.dtype
    query, key = (_to_length_one(part) for part in (query, key))
    parts = (query * query.shape[-1] ** -0.5, key, value, decay[..., None], rate[..., None])
    # [chunks, heads, CHUNK, ...], zeros beyond the end of a sequence.
    query, key, value, decay, rate = (
        (part.float()[chunks.rows] * chunks.present[..., None, None]).transpose(1, 2) for part in parts
    )
    total = decay.cumsum(2)
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    between = (total - total.transpose(2, 3)).masked_fill(~past, -torch.inf).exp()
    since_start = total.exp()
    system = rate * (key @ key.transpose(2, 3)) * between
    known = torch.cat([rate * value, rate * since_start * key], dim=-1)
    # The diagonal of the system is taken as 1, whatever it holds.
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    within = (query @ key.transpose(2, 3)) * between
    until_end = (total[:, :, -1:] - total).exp()
    by_step = zip(
        *(
            part.split(chunks.counts)
            for part in (solved, within, since_start * query, until_end * key, since_start[:, :, -1:])
        ),
        strict=True,
    )
    state = value.new_zeros(chunks.counts[0], value.shape[1], key.shape[-1], value.shape[-1])
    outputs = []
    for learned, attention, reading, writing, kept in by_step:
        state = state[: len(learned)]
        from_tokens, from_state = learned.split([value.shape[-1], key.shape[-1]], dim=-1)
        writes = from_tokens - from_state @ state
        outputs.append(reading @ state + attention @ writes)
        state = kept * state + writing.transpose(2, 3) @ writes
    found = torch.cat(outputs).transpose(1, 2)[chunks.present]
    return found[torch.argsort(chunks.rows[chunks.present])].to(dtype)


def _to_length_one(vectors: Tensor) -> Tensor:
    """Returns float32 vectors along the last dimension divided by their lengths."""
    vectors = vectors.float()
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPS)
