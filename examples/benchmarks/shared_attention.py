"""Attention of a decode step whose sequences share prompts, beside FlashAttention 3 and the device's memory. One GPU.

    python examples/benchmarks/shared_attention.py --output result.json
    python examples/benchmarks/shared_attention.py equal --search

Each case is a batch of sequences in random order, with random pages, keys and values in bfloat16, for `LAYERS` layers
with memory of their own in one CUDA graph. Of a case: microseconds of a layer by rlframe's kernels and by
FlashAttention 3 as vLLM calls it in a graph, the least that reading each key and value once takes by the read speed of
the same run, microseconds of the plan of a step (once for all layers), and the greatest difference of the results.
`--search` tries other numbers of programs, keys, warps and stages, and items of other lengths.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
from weight_sync import machine

from rlframe.rollout.vllm.attention.kernels import attend
from rlframe.rollout.vllm.attention.plan import Plan, Tuning, tuning_for

SIZE, PAGE, LAYERS, SPLITS = 128, 16, 8, 32
"""Dimension of a head, tokens of a page, layers, and vLLM's greatest number of divisions of a sequence in a graph."""
DEVICE = torch.device("cuda")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch."""

    groups: int
    group: int = 8
    prompt: int
    mean: int
    """Mean tokens of a response, of which there are 1 to 2 * mean."""
    heads: tuple[int, int] = (16, 8)
    """Of queries, and of keys and values."""


CASES = {
    "equal": Case(groups=32, prompt=170, mean=256),
    "begin": Case(groups=32, prompt=170, mean=16),
    "tail": Case(groups=8, prompt=4096, mean=300),
    "few": Case(groups=5, group=2, prompt=4096, mean=500),
    "one": Case(groups=1, prompt=4096, mean=500),
    "single": Case(groups=1, group=1, prompt=4096, mean=800),
    "apart": Case(groups=8, group=1, prompt=4096, mean=800),
    "equal_8b": Case(groups=32, prompt=170, mean=256, heads=(32, 8)),
    "tail_8b": Case(groups=8, prompt=4096, mean=300, heads=(32, 8)),
    "apart_8b": Case(groups=8, group=1, prompt=4096, mean=800, heads=(32, 8)),
    "equal_30b": Case(groups=32, prompt=170, mean=256, heads=(32, 4)),
    "tail_30b": Case(groups=8, prompt=4096, mean=300, heads=(32, 4)),
    "alone": Case(groups=256, group=1, prompt=170, mean=256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=[*CASES, []], nargs="*")
    parser.add_argument("--search", action="store_true", help="other tunings too, the fastest first")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "read_bytes_per_s": read_speed(), "cases": {}}
    for name in arguments.cases or CASES:
        result["cases"][name] = measured(CASES[name], result["read_bytes_per_s"], search=arguments.search)
        print(name, json.dumps(result["cases"][name]), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Seconds of `work` as a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats


def read_speed() -> float:
    """Bytes a second of the sum of 1 GiB."""
    memory = torch.zeros(1 << 27, dtype=torch.int64, device=DEVICE)
    return memory.nbytes / seconds(memory.sum)


def measured(case: Case, speed: float, *, search: bool) -> dict[str, Any]:
    """Returns the figures of a case."""
    tables, lengths, num_pages = batch(case)
    query_heads, heads = case.heads
    shape = (num_pages, PAGE, heads, 2 * SIZE)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)]
    q = torch.randn(len(lengths), query_heads, SIZE, dtype=torch.bfloat16, device=DEVICE)
    theirs, shared = torch.empty_like(q), (case.prompt - 1) // PAGE * PAGE
    unique = int(lengths.sum()) - (case.group - 1) * case.groups * shared
    flash_us = seconds(lambda: flash(q, caches, tables, lengths, theirs)) / LAYERS * 1e6
    found: dict[str, Any] = {
        "tokens": int(lengths.sum()),
        "tokens_once": unique,
        "floor_us": unique * heads * 2 * SIZE * 2 / speed * 1e6,
        "flash_us": flash_us,
    }
    tried = {}
    for tuning in tunings() if search else (None,):
        ours = ours_of(case, q, caches, tables, lengths, tuning)
        if ours is not None:
            ours["difference"] = (ours.pop("out").float() - theirs.float()).abs().max().item()
            tried[str(astuple(tuning) if tuning else "tuned")] = ours | {"over_flash": flash_us / ours["us"]}
    return found | {"ours": dict(sorted(tried.items(), key=lambda item: item[1]["us"]))}


def batch(case: Case) -> tuple[Tensor, Tensor, int]:
    """Page tables [B, P] and lengths [B], and the number of pages."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    rows, shared = case.groups * case.group, (case.prompt - 1) // PAGE
    lengths = case.prompt + torch.randint(1, 2 * case.mean + 1, (rows,), device=DEVICE, generator=generator).int()
    own = int(lengths.max()) // PAGE + 1 - shared
    num_pages = case.groups * shared + rows * own
    pages = torch.randperm(num_pages, device=DEVICE, generator=generator).int()
    prompts, responses = pages.split([case.groups * shared, rows * own])
    tables = torch.cat([prompts.view(case.groups, -1).repeat(case.group, 1), responses.view(rows, own)], 1)
    order = torch.randperm(rows, device=DEVICE, generator=generator)
    return tables[order].contiguous(), lengths[order].contiguous(), num_pages


def flash(q: Tensor, caches: list[Tensor], tables: Tensor, lengths: Tensor, out: Tensor) -> None:
    """FlashAttention 3 of all layers, as vLLM's backend calls it."""
    rows = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    for cache in caches:
        k, v = cache.split(SIZE, dim=-1)
        flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=rows,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=tables.shape[1] * PAGE,
            softmax_scale=SIZE**-0.5,
            causal=True,
            block_table=tables,
            fa_version=3,
            num_splits=SPLITS,
        )


def tunings() -> Iterator[Tuning]:
    """Those that `--search` tries."""
    for group in (16, 32, 64):
        yield tuning_for(group)
    for programs, tokens, warps, stages in itertools.product((2, 4, 6, 8, 11), (16, 32, 64), (1, 2, 4), (2, 3, 4)):
        # Those that fit a processor's shared memory of 228 KiB, and are not too many for its registers.
        if tokens * SIZE * 4 * stages * min(programs, 4) <= 228 << 10 and programs * warps <= 32:
            yield from (Tuning(programs, tokens, warps, stages, chunk) for chunk in (128, 256))
    # Items of the same length, whatever their number.
    for chunk in range(64, 513, 64):
        yield replace(tuning_for(1), chunk=chunk, full_chunk=chunk, long_chunk=chunk)


def ours_of(
    case: Case, q: Tensor, caches: list[Tensor], tables: Tensor, lengths: Tensor, tuning: Tuning | None
) -> dict[str, Any] | None:
    """Returns the figures of rlframe's kernels, or None if the device lacks the memory for the tuning."""
    query_heads, heads = case.heads
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    sizes = {"page": PAGE, "heads": heads, "query_heads": query_heads, "width": SIZE, "processors": processors}
    plan, out = Plan.of(max_rows=len(lengths), device=DEVICE, tuning=tuning, **sizes), torch.empty_like(q)

    def all_layers() -> None:
        for cache in caches:
            k, v = cache.split(SIZE, dim=-1)
            attend(plan, q, k, v, tables, scale=SIZE**-0.5, out=out)

    plan_s = seconds(lambda: plan.fill(tables, lengths))
    try:
        us = seconds(all_layers) / LAYERS * 1e6
    except OutOfResources:
        return None
    return {"us": us, "plan_us": plan_s * 1e6, "items": int(plan.count), "out": out}


if __name__ == "__main__":
    main()
