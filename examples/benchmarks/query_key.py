"""Queries, keys and values out of the projection's output by one kernel, beside the operations that it replaces, and
beside the device's copy speed of the same run. One GPU.

    python examples/benchmarks/query_key.py --output result.json
    python examples/benchmarks/query_key.py qwen3_1p7b --search

Of a case: microseconds of the forward kernel and of the backward one, as CUDA graphs; the same of torch's norms of
heads, Transformer Engine's rotary positions and the copies between; the least that reading and writing each number once
takes by the copy speed; and how far the results are apart, relative to their norms. `--search` tries other numbers of
heads, programs and warps.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from shared_attention import seconds
from torch import Tensor
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from weight_sync import machine

from rlframe.megatron.model.layers import query_key_kernels as kernels
from rlframe.megatron.model.layers.query_key import TurnedHeads

DEVICE = torch.device("cuda")
EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A micro-batch."""

    tokens: int
    heads: kernels.Heads


CASES = {
    "qwen3_1p7b": Case(tokens=8704, heads=kernels.Heads(8, 2, 128)),
    "qwen3_30b_a3b": Case(tokens=8704, heads=kernels.Heads(4, 8, 128)),
    "qwen3_4b": Case(tokens=16384, heads=kernels.Heads(8, 4, 128)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=[*CASES, []], nargs="*")
    parser.add_argument("--search", action="store_true", help="other sizes too, the fastest first")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "copy_bytes_per_s": copy_speed(), "cases": {}}
    for name in arguments.cases or CASES:
        result["cases"][name] = measured(CASES[name], result["copy_bytes_per_s"], search=arguments.search)
        print(name, json.dumps(result["cases"][name]), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def copy_speed() -> float:
    """Bytes a second of a copy of 1 GiB, read and written ones."""
    memory = torch.zeros(1 << 27, dtype=torch.int64, device=DEVICE)
    other = torch.empty_like(memory)
    return 2 * memory.nbytes / seconds(lambda: other.copy_(memory))


def measured(case: Case, speed: float, *, search: bool) -> dict[str, Any]:
    """Returns the figures of a case."""
    heads, rows = case.heads, case.tokens
    mixed = torch.randn(rows, heads.count * heads.size, device=DEVICE).bfloat16().requires_grad_()
    weights = [(1 + torch.rand(heads.size, device=DEVICE)).bfloat16().requires_grad_() for _ in range(2)]
    angles = 100 * torch.rand(rows, heads.size // 2, device=DEVICE)
    turns, both_halves = (angles.cos(), angles.sin()), torch.cat([angles, angles], -1)[:, None, None]
    bounds = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    sizes = (heads.keys, heads.group, heads.size)
    ways = {
        "separate": lambda: separate(mixed, weights, both_halves, bounds, heads),
        "one": lambda: TurnedHeads.apply(mixed, *weights, turns, sizes, EPSILON),
    }
    grads = [torch.randn_like(part) for part in ways["one"]()]
    # Without their graphs, whose nodes of the leaves would belong to this stream, which no CUDA graph may wait for.
    results = {
        name: [*(part.detach() for part in way()), *gradients(way(), [mixed, *weights], grads)]
        for name, way in ways.items()
    }
    found: dict[str, Any] = {
        "forward_floor_us": 2e6 * mixed.nbytes / speed,
        "backward_floor_us": 3e6 * mixed.nbytes / speed,
        "distances": [
            float((mine.float() - other.float()).norm() / other.float().norm())
            for mine, other in zip(results["one"], results["separate"], strict=True)
        ],
    }
    for name, way in ways.items():
        forward_s = seconds(way)
        # A graph of both, because a backward pass of its own would need what a forward pass has kept.
        both_s = seconds(lambda way=way: gradients(way(), [mixed, *weights], grads))
        found[name] = {"forward_us": forward_s * 1e6, "backward_us": (both_s - forward_s) * 1e6}
    if search:
        found["search"] = searched(lambda: gradients(ways["one"](), [mixed, *weights], grads))
    return found


def separate(
    mixed: Tensor, weights: list[Tensor], angles: Tensor, bounds: Tensor, heads: kernels.Heads
) -> list[Tensor]:
    """Returns queries, keys and values as Megatron's attention makes them with `rope_fusion`."""
    parts = mixed.view(len(mixed), 1, heads.keys, -1).split([heads.group * heads.size, heads.size, heads.size], 3)
    q, k = (
        F.rms_norm(part.reshape(len(mixed), 1, -1, heads.size), (heads.size,), weight, EPSILON).squeeze(1)
        for part, weight in zip(parts[:2], weights, strict=True)
    )
    q, k = (apply_rotary_pos_emb(part, angles, tensor_format="thd", fused=True, cu_seqlens=bounds) for part in (q, k))
    return [q, k, parts[2].squeeze(1).contiguous()]


def gradients(parts: Any, leaves: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns the gradients of the leaves."""
    return torch.autograd.grad(parts, leaves, grads)


def searched(work: Callable[[], Any]) -> list[tuple[float, int, int, int]]:
    """Returns microseconds of forward and backward with heads, programs and warps, the fastest first."""
    before, found = (kernels.HEADS, kernels.PROGRAMS, kernels.WARPS), []
    sizes = itertools.product((8, 16, 32), (264, 330, 512, 1024), (2, 4, 8))
    for kernels.HEADS, kernels.PROGRAMS, kernels.WARPS in sizes:
        found.append((seconds(work) * 1e6, kernels.HEADS, kernels.PROGRAMS, kernels.WARPS))
    kernels.HEADS, kernels.PROGRAMS, kernels.WARPS = before
    return sorted(found)


if __name__ == "__main__":
    main()
