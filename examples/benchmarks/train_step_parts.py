"""What `train_step.py` measures with: FLOP counts, the speed of plain matrix products, and kernels by group."""

import importlib
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rlframe.models.hub import FAMILIES
from rlframe.run.preflight.seconds import mean_length, training_operations

GROUPS = (
    ("communication", r"nccl|all_?gather|reduce_scatter|all_?reduce|gloo|c10d"),
    ("loss", r"^_statistics|^_gradient$"),
    ("attention", r"sdpa|fmha|flash|attention|fused_attn"),
    ("gated delta net", r"delta|wy_repr|recompute_w_u|causal_conv1d|cumsum_scalar|chunk_(fwd|bwd)|l2norm|norm_gated"),
    ("optimizer", r"^update$|^squares$|[aA]dam|multi_tensor|foreach"),
    ("norms", r"norm_(fwd|bwd)|rmsnorm|layernorm|rms_norm|Norm"),
    ("rotary", r"rope|rotary|Rotary"),
    ("activation", r"swiglu|silu|sigmoid"),
    ("experts' order", r"^_copy$|^_sum$|permut|sort|topk|row_id|scatter|gather|index"),
    ("matrix products", r"^_multiply$|^_add$|gemm|nvjet|cutlass|xmma|cublas|wgrad|dgrad|addmm|::mm|bmm|matmul|linear"),
    ("copies and fills", r"memcpy|memset|copy|fill|zero|cat|clone|_to_copy"),
)
"""Name of each group and what its kernels' names contain; the first that fits counts."""


def flops_per_token(config: dict[str, Any], lengths: Sequence[int]) -> float:
    """Forward and backward of one real token: see train_step.py; a router counts with its h * E. Models with gated
    delta nets are counted by preflight, `training_operations`."""
    if config.get("linear_num_key_heads"):
        family = importlib.import_module(f"{FAMILIES}.{config['model_type']}").FAMILY
        return training_operations(family.architecture(config), mean_length=mean_length(list(lengths)))
    hidden, heads, kv = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head = config["head_dim"]
    mlp = 3 * hidden * config.get("intermediate_size", 0)
    if experts := config.get("num_experts"):
        mlp = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"] + hidden * experts
    seen = 2 * mean_length(list(lengths)) * heads * head
    layer = 2 * (2 * hidden * heads * head + 2 * hidden * kv * head) + 2 * mlp + seen
    return 3 * (config["num_hidden_layers"] * layer + 2 * hidden * config["vocab_size"])


def products(config: dict[str, Any], tokens: int) -> list[tuple[int, int, int, int]]:
    """(times, rows, inner, columns) of the forward matrix products of a micro-batch of `tokens`, all its experts."""
    hidden, heads, kv = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    layers, head, nets, gates = config["num_hidden_layers"], config["head_dim"], 0, 0
    shapes = [(1, tokens, hidden, config["vocab_size"])]
    if keys := config.get("linear_num_key_heads"):
        # Of each four layers three have a gated delta net, and the fourth a gate for each number of its queries.
        nets, gates = layers - layers // config["full_attention_interval"], heads
        values = config["linear_num_value_heads"]
        outputs = values * config["linear_value_head_dim"]
        inputs = 2 * keys * config["linear_key_head_dim"] + 2 * outputs + 2 * values
        shapes += [(nets, tokens, hidden, inputs), (nets, tokens, outputs, hidden)]
    attention = layers - nets
    shapes += [
        (attention, tokens, hidden, (heads + gates + 2 * kv) * head),
        (attention, tokens, heads * head, hidden),
    ]
    if experts := config.get("num_experts"):
        # All experts of a layer, each with its even share of the tokens, and the one that all tokens share.
        width, rows = config["moe_intermediate_size"], tokens * config["num_experts_per_tok"] // experts
        mlps = [(layers * experts, rows, width)]
        if shared := config.get("shared_expert_intermediate_size"):
            mlps.append((layers, tokens, shared))
    else:
        mlps = [(layers, tokens, config["intermediate_size"])]
    for times, rows, width in mlps:
        shapes += [(times, rows, hidden, 2 * width), (times, rows, width, hidden)]
    return shapes


def matmul_floor(config: dict[str, Any], tokens: int) -> dict[str, float]:
    """Seconds that the model's matrix products take alone, forward and both of backward, in bfloat16 on this GPU."""
    seconds, flops = 0.0, 0.0
    for times, rows, inner, columns in products(config, tokens):
        for shape in ((rows, inner, columns), (rows, columns, inner), (columns, rows, inner)):
            seconds += times * product_s(*shape)
            flops += times * 2 * rows * inner * columns
    return {"microbatch_s": seconds, "tflops": flops / seconds / 1e12}


def product_s(rows: int, inner: int, columns: int, repeats: int = 10) -> float:
    """Seconds of one product [rows, inner] x [inner, columns]."""
    left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ right.T
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        left @ right.T
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats


def peak_memory(worker: Any) -> dict[str, int]:
    """Most device memory this rank has held: in tensors, and by torch's allocator. Runs in a worker."""
    if not torch.cuda.is_available():
        return {"peak_bytes": 0, "reserved_bytes": 0}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def start_profile(worker: Any) -> None:
    """Record kernels (operations on a CPU) from now on. Runs in a worker."""
    activity = torch.profiler.ProfilerActivity
    worker.profiler = torch.profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU])
    worker.profiler.start()


def stop_profile(worker: Any) -> dict[str, Any]:
    """Milliseconds and launches by group, of the longest other kernels by name, and of nothing running, by the kernel
    that came then. In a worker."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    worker.profiler.stop()
    spans: list[tuple[str, float, float]] = []
    for event in worker.profiler.events():
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        if on_device or not torch.cuda.is_available():
            spans.append((event.name, event.time_range.start, event.time_range.end))
    return by_group(spans)


def start_operations(worker: Any) -> None:
    """Record the host's operations beside the kernels from now on, which slows the host down. Runs in a worker."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, *([activity.CUDA] if torch.cuda.is_available() else [])]
    worker.profiler = torch.profiler.profile(activities=kinds)
    worker.profiler.start()


def stop_operations(worker: Any) -> dict[str, dict[str, float]]:
    """Times, milliseconds of the host and milliseconds of the device of the most frequent operations by name, without
    those of operations that they call. In a worker."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    worker.profiler.stop()
    most = sorted(worker.profiler.key_averages(), key=lambda operation: -operation.count)[:120]
    return {
        operation.key[:120]: {
            "times": operation.count,
            "host_ms": operation.self_cpu_time_total / 1e3,
            "device_ms": getattr(operation, "self_device_time_total", 0.0) / 1e3,
        }
        for operation in most
    }


def by_group(spans: list[tuple[str, float, float]]) -> dict[str, Any]:
    """What `stop_profile` returns, from (name, start, end) in microseconds."""
    total, launches, names = defaultdict(float), defaultdict(int), defaultdict(float)
    for name, start, end in spans:
        group = group_of(name)
        total[group] += (end - start) / 1e3
        launches[group] += 1
        names[f"{group}: {name[:90]}"] += (end - start) / 1e3
    busy, last, gaps = 0.0, min((start for _, start, _ in spans), default=0.0), defaultdict(float)
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        busy += max(0.0, end - max(start, last)) / 1e3
        gaps[f"{group_of(name)}: {name[:90]}"] += max(0.0, start - last) / 1e3
        last = max(last, end)
    whole = (max(end for *_, end in spans) - min(start for _, start, _ in spans)) / 1e3 if spans else 0.0
    longest, waited = (sorted(each.items(), key=lambda item: -item[1])[:25] for each in (names, gaps))
    return {
        "whole_ms": whole,
        "idle_ms": whole - busy,
        "groups_ms": dict(sorted(total.items(), key=lambda item: -item[1])),
        "launches": dict(launches),
        "longest_ms": dict(longest),
        "waited_ms": dict(waited),
    }


def group_of(name: str) -> str:
    """The group a kernel belongs to."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "elementwise and other")


if __name__ == "__main__":
    print(json.dumps(matmul_floor(json.loads(sys.argv[1]), int(sys.argv[2]))))
