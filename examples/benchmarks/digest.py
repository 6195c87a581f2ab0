"""Measures the checksum of weights on a GPU against a plain read of the same memory, in one call.

`python examples/benchmarks/digest.py` on one GPU with 40 GB or more; writes results/digest.json. Each variant is the
kernel that weight sync runs, with another tile; the first is its own.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlframe.weight_sync.layout.memory import MemoryLayout, record
from rlframe.weight_sync.proof import digest_kernels
from rlframe.weight_sync.proof.digest import common_units, digest

Shapes = dict[str, tuple[int, ...]]
OWN = digest_kernels.BLOCK, digest_kernels.STEPS, digest_kernels.WARPS, digest_kernels.MAX_COLS
VARIANTS = (OWN, (512, 8, 2, 256), (1024, 8, 4, 256))
"""(words of a block, blocks of a tile, warps, words of a tile's row at most)."""


@triton.jit
def _read(data, total, WORDS: tl.constexpr, ROUNDS: tl.constexpr):
    """Adds up 64-bit words: a read and next to nothing else."""
    start = tl.program_id(0).to(tl.int64) * WORDS * ROUNDS + tl.arange(0, WORDS)
    value = tl.zeros([WORDS], dtype=tl.int64)
    for index in tl.static_range(ROUNDS):
        value += tl.load(data + start + index * WORDS)
    tl.atomic_add(total, tl.sum(value, 0), sem="relaxed")


def main() -> None:
    """Measures every case and variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12, help="of the mixture of experts, which has 48 in full")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results/digest.json"))
    arguments = parser.parse_args()
    cases = {
        "one matrix 65536 x 65536": ({"p": (65536, 65536)}, {"t": (65536, 65536)}, lambda p, c: p["p"].copy_(c["t"])),
        f"Qwen3-30B-A3B, {arguments.layers} of 48 layers": mixture(arguments.layers),
    }
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    found["agrees_with_cpu"] = agrees()
    print(found, flush=True)
    for name, (parameters, tensors, load) in cases.items():
        found[name] = measure(parameters, tensors, load)
        torch.cuda.empty_cache()
    Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def mixture(layers: int) -> tuple[Shapes, Shapes, Callable]:
    """(parameters, tensors, loader) of Qwen3-30B-A3B as an engine fuses it: 393 tensors a layer."""
    hidden, wide, experts, heads, groups, size = 2048, 768, 128, 32, 4, 128
    parameters: Shapes = {"embed": (151936, hidden), "head": (151936, hidden)}
    tensors: Shapes = dict(parameters)
    for layer in range(layers):
        parameters |= {
            f"{layer}.qkv": ((heads + 2 * groups) * size, hidden),
            f"{layer}.o": (hidden, heads * size),
            f"{layer}.w13": (experts, 2 * wide, hidden),
            f"{layer}.w2": (experts, hidden, wide),
            f"{layer}.router": (experts, hidden),
        }
        tensors |= {
            f"{layer}.q": (heads * size, hidden), f"{layer}.k": (groups * size, hidden),
            f"{layer}.v": (groups * size, hidden), f"{layer}.o": (hidden, heads * size),
            f"{layer}.router": (experts, hidden),
        }  # fmt: skip
        for expert in range(experts):
            tensors |= {
                f"{layer}.{expert}.gate": (wide, hidden), f"{layer}.{expert}.up": (wide, hidden),
                f"{layer}.{expert}.down": (hidden, wide),
            }  # fmt: skip

    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        for name in ("embed", "head"):
            p[name].copy_(c[name])
        for layer in range(layers):
            parts = p[f"{layer}.qkv"].split([heads * size, groups * size, groups * size])
            for name, part in zip("qkv", parts, strict=True):
                part.copy_(c[f"{layer}.{name}"])
            for name in ("o", "router"):
                p[f"{layer}.{name}"].copy_(c[f"{layer}.{name}"])
            for expert in range(experts):
                p[f"{layer}.w13"][expert, :wide].copy_(c[f"{layer}.{expert}.gate"])
                p[f"{layer}.w13"][expert, wide:].copy_(c[f"{layer}.{expert}.up"])
                p[f"{layer}.w2"][expert].copy_(c[f"{layer}.{expert}.down"])

    return parameters, tensors, load


def recorded(shapes: Shapes, tensors: Shapes, load: Callable) -> tuple[Tensor, dict[str, Tensor], MemoryLayout]:
    """(one buffer, its parameters, their layout), of random bits that are no NaN."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    flat = torch.empty(-(-sum(sizes) // (1 << 16)) * (1 << 16), dtype=torch.bfloat16, device="cuda")
    for part in flat.split(1 << 28):
        part.normal_()
    pieces = flat[: sum(sizes)].split(sizes)
    parameters = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    twins = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    return flat, parameters, record(load, twins, tensors)


def measure(shapes: Shapes, tensors: Shapes, load: Callable) -> dict[str, float]:
    """GB/s of a plain read and milliseconds of each variant, and their ratios to the read."""
    flat, parameters, layout = recorded(shapes, tensors, load)
    num_bytes = flat.numel() * 2
    words, total = flat.view(torch.int64), torch.zeros(1, dtype=torch.int64, device="cuda")
    floors = {"torch sum": milliseconds(lambda: words.sum())}
    for size, rounds in ((1024, 4), (2048, 4), (1024, 16)):
        tile = size * rounds
        assert words.numel() % tile == 0, "the buffer is a multiple of 65536 elements"
        run = lambda size=size, rounds=rounds, tile=tile: _read[(words.numel() // tile,)](  # noqa: E731
            words, total, size, rounds
        )
        floors[f"triton read {size} x {rounds}"] = milliseconds(run)
    floor = min(floors.values())
    result: dict[str, float] = {f"{name}_gb_per_s": num_bytes / ms / 1e6 for name, ms in floors.items()}
    print(f"{num_bytes / 1e9:.1f} GB in {len(tensors)} tensors; read {floor:.3f} ms", result, flush=True)
    units = common_units([layout])
    for variant in VARIANTS:
        settings(variant)
        table = digest_kernels.DigestTable(layout, parameters, list(layout.tensors), units=units)
        ms = milliseconds(table.launch)
        name = "{} words x {}, {} warps, {} wide".format(*variant)
        result |= {f"{name}: ms": ms, f"{name}: ratio": ms / floor}
        print(f"{name}: {ms:.3f} ms, {ms / floor:.3f} of a read, {len(table._launches)} launches", flush=True)
    settings(OWN)
    return result


def settings(variant: tuple[int, int, int, int]) -> None:
    """Makes the kernel's next tables those of a variant."""
    digest_kernels.BLOCK, digest_kernels.STEPS, digest_kernels.WARPS, digest_kernels.MAX_COLS = variant


def milliseconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Median of the device's own time."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def agrees() -> bool:
    """Whether the GPU's shares are the CPU's, of odd shapes and every format."""
    fine = True
    for held, seen in ((torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)):
        value = torch.randn(70, 1112).to(held)
        layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": value}, {"t": (70, 1112)})
        for units in ({}, {"t": 4}):
            keyed = {"dtypes": {"t": seen}, "units": units, "seed": 5}
            expected = digest(layout, {"p": value}, **keyed)["t"]
            table = digest_kernels.DigestTable(layout, {"p": value.cuda()}, ["t"], **keyed)
            fine &= int(table.shares()[0]) == expected
    return fine


if __name__ == "__main__":
    main()
