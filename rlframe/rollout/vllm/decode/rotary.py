"""Norms and rotations of queries and keys in vLLM's attention layers, by one kernel that begins before the one ahead of
it has ended (Triton, NVIDIA's programmatic dependent launch).

Inductor makes two kernels, of which the one that rotates begins late: 4 microseconds of a layer's 82 in a profile of a
decode step of eight sequences of a 1.7 B on an H200 (2026-11-29, by hand). This file can go when vLLM's pass
`enable_qk_norm_rope_fusion` has a kernel that begins early.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from rlframe.rollout.vllm.attention.kernels import can_depend

HEADS = 4
"""Heads of a program."""
ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")
"""vLLM's classes whose `forward` is: project, norms of queries and keys if there are any, rotate, attend, project (0.26
to 0.32)."""


@triton.jit
def _rotate(
    qkv, positions, angles, query_norm, key_norm, query, key, qkv_row, query_heads, key_heads, epsilon,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes `HEADS` heads of a row: their norms, if they have some, rotated by the angles of the row's position.

    Args:
        HALF: half of SIZE, the dimension of a head. Number i is rotated with number HALF + i.
        DEPENDENT: whether the kernel is launched before the one ahead of it has ended.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, HALF)
    is_query, there = (head < query_heads)[:, None], (head < query_heads + key_heads)[:, None]
    if DEPENDENT:
        cuda.gdc_wait()
        # Only now: a kernel that begins earlier would not know that those before this one have ended.
        cuda.gdc_launch_dependents()
    at = angles + tl.load(positions + row) * SIZE + col
    cos, sin = tl.load(at).to(tl.float32)[None, :], tl.load(at + HALF).to(tl.float32)[None, :]
    place = head[:, None] * SIZE + col[None, :]
    first = tl.load(qkv + row * qkv_row + place, mask=there, other=0.0).to(tl.float32)
    second = tl.load(qkv + row * qkv_row + place + HALF, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        norm = tl.where(is_query, query_norm, key_norm) + col[None, :]
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + epsilon)[:, None]
        first *= scale * tl.load(norm).to(tl.float32)
        second *= scale * tl.load(norm + HALF).to(tl.float32)
    of_key = key + (row * key_heads - query_heads) * SIZE + place
    result = tl.where(is_query, query + row * query_heads * SIZE + place, of_key)
    tl.store(result, (first * cos - second * sin).to(query.dtype.element_ty), mask=there)
    tl.store(result + HALF, (second * cos + first * sin).to(query.dtype.element_ty), mask=there)


def _shaped(qkv: Tensor, positions: Tensor, angles: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns tensors of the shapes that `rotate` returns, for the same arguments."""
    _, _, query_heads, key_heads, _ = others
    rows, size = qkv.shape[0], angles.shape[1]
    return qkv.new_empty(rows, query_heads * size), qkv.new_empty(rows, key_heads * size)


def rotate(
    qkv: Tensor,
    positions: Tensor,
    angles: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    query_heads: int,
    key_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Returns the queries [B, H * D] and the keys [B, K * D] of `qkv`, normed and rotated.

    Args:
        qkv: [B, (H + 2 K) * D] queries, keys and values, each row contiguous.
        positions: [B] int64.
        angles: [P, D] cosines and sines of each position, D / 2 of each.
        query_norm, key_norm: [D] weights of the norms over a head, or None.
        query_heads, key_heads: H and K.
    """
    query, key = _shaped(qkv, positions, angles, query_norm, key_norm, query_heads, key_heads, epsilon)
    size, dependent = angles.shape[1], can_depend(qkv)
    if len(qkv):
        _rotate[(len(qkv), triton.cdiv(query_heads + key_heads, HEADS))](
            qkv,
            positions,
            angles,
            query_norm,
            key_norm,
            query,
            key,
            qkv.stride(0),
            query_heads,
            key_heads,
            epsilon,
            HEADS=HEADS,
            SIZE=size,
            HALF=size // 2,
            NORMED=query_norm is not None,
            DEPENDENT=dependent,
            num_warps=1,
            **({"launch_pdl": True} if dependent else {}),
        )
    return query, key


LIBRARY = torch.library.Library("rlframe", "FRAGMENT")
LIBRARY.define(
    "rotate(Tensor qkv, Tensor positions, Tensor angles, Tensor? query_norm, Tensor? key_norm, int query_heads, "
    "int key_heads, float epsilon) -> (Tensor, Tensor)"
)
LIBRARY.impl("rotate", rotate, "CUDA")
torch.library.register_fake("rlframe::rotate", _shaped, lib=LIBRARY)


ROTATES = "rlframe_rotates"
"""Attribute of an attention layer: whether it norms and rotates by the kernel above. A `forward` that can has it."""


def install(model: torch.nn.Module) -> None:
    """Makes the attention layers of vLLM's `model` norm and rotate by the kernel above, where it knows how. To be done
    before vLLM compiles the model."""
    for layer in model.modules():
        kind: Any = type(layer)
        if kind.__name__ not in ATTENTIONS or not kind.__module__.startswith("vllm."):
            continue
        # Found here once: Dynamo follows `forward`.
        setattr(layer, ROTATES, rotates_plainly(layer))
        if not hasattr(kind.forward, ROTATES):
            kind.forward = by_one_kernel(kind.forward)


def rotates_plainly(layer: Any) -> bool:
    """Returns whether an attention layer rotates whole heads, halves against each other, by a table of angles, and
    norms queries and keys alike, if at all."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary, size = layer.rotary_emb, layer.head_dim
    by_table = isinstance(rotary, RotaryEmbedding) and rotary.is_neox_style
    for name in ("forward_static", "forward_native"):
        by_table = by_table and getattr(type(rotary), name) is getattr(RotaryEmbedding, name)
    norms = [layer.q_norm, layer.k_norm] if has_norms(layer) else []
    return (
        by_table
        and rotary.head_size == rotary.rotary_dim == size
        and size & (size - 1) == 0
        and len({norm.variance_epsilon for norm in norms}) <= 1
        and all(type(norm) is RMSNorm and norm.has_weight and norm.hidden_size == size for norm in norms)
    )


def has_norms(layer: Any) -> bool:
    """Returns whether an attention layer norms its queries and keys. Those of Qwen 2 say so."""
    return hasattr(layer, "q_norm") and getattr(layer, "qk_norm", True)


def by_one_kernel(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the `forward` of a class of attention layers. Layers that rotate in another way keep `own`."""

    @functools.wraps(own)
    def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if not getattr(self, ROTATES, False) or positions.ndim != 1:
            return own(self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.o_proj(attended(self, positions, qkv))
        return output

    setattr(forward, ROTATES, True)
    return forward


def attended(layer: Any, positions: Tensor, qkv: Tensor) -> Tensor:
    """Returns the result [B, H * D] of an attention layer that can rotate by the kernel above, before its last product.

    Args:
        positions: [B] int64.
        qkv: [B, (H + 2 K) * D] queries, keys and values.
    """
    norms, epsilon = (None, None), 0.0
    if has_norms(layer):
        norms, epsilon = (layer.q_norm.weight, layer.k_norm.weight), layer.q_norm.variance_epsilon
    query, key = torch.ops.rlframe.rotate(
        qkv, positions, layer.rotary_emb.cos_sin_cache, *norms, layer.num_heads, layer.num_kv_heads, epsilon
    )
    return layer.attn(query, key, qkv[:, layer.q_size + layer.kv_size :])
