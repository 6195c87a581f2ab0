"""Products of few rows in an engine's decode steps, beside cuBLAS and the device's memory. One GPU, of compute
capability 9.0 or newer.

    python examples/benchmarks/few_rows.py --output result.json
    python examples/benchmarks/few_rows.py qwen3_1p7b --search

Of each product of a model's layer, and of 1, 8 and 16 rows: microseconds by rlframe's kernel and by cuBLAS, one weight
after the other in a CUDA graph, of more bytes together than the GPU's cache holds; the least that reading the weight
takes by the read speed of the same run; and how far the results are apart, relative to their norm. `--search` tries
other tiles.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from models_by_size import MODELS
from shared_attention import DEVICE, read_speed, seconds
from torch import Tensor
from triton.runtime.errors import OutOfResources
from weight_sync import machine

from rlframe.rollout.vllm.decode.few_rows import Tiles, multiply, tiles_for

ROWS = (1, 8, 16)
BYTES = 1 << 29
"""Of all weights of a product, several times the cache of an H200."""
NAMES = ("qwen3_1p7b", "qwen3_4b", "qwen3_8b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", choices=[*NAMES, []], nargs="*")
    parser.add_argument("--search", action="store_true", help="other tiles too, the fastest first")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "read_bytes_per_s": read_speed(), "models": {}}
    for name in arguments.models or NAMES:
        found = result["models"].setdefault(name, {})
        for product, (columns, depth) in products(MODELS[name]).items():
            found[product] = measured(columns, depth, result["read_bytes_per_s"], search=arguments.search)
            print(name, product, json.dumps(found[product]), flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def products(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the columns and the inner dimension of each product of a layer."""
    hidden, size, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        "qkv": (queries + 2 * keys, hidden),
        "output": (hidden, queries),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def measured(columns: int, depth: int, speed: float, *, search: bool) -> dict[str, Any]:
    """Returns the figures of a product."""
    size = columns * depth * 2
    weights = [torch.randn(columns, depth, device=DEVICE).bfloat16() for _ in range(-(-BYTES // size))]
    found: dict[str, Any] = {"columns": columns, "depth": depth, "floor_us": size / speed * 1e6, "rows": {}}
    for rows in ROWS:
        x = torch.randn(rows, depth, device=DEVICE).bfloat16()
        theirs = x @ weights[0].T
        cublas_us = seconds(lambda x=x: [x @ weight.T for weight in weights]) / len(weights) * 1e6
        ours = {}
        for tiles in tried(columns, depth, search=search):
            try:
                ours[str(tuple(tiles))] = of_tiles(x, weights, theirs, tiles)
            except OutOfResources:
                continue
        fastest_first = dict(sorted(ours.items(), key=lambda item: item[1]["us"]))
        found["rows"][rows] = {"cublas_us": cublas_us, "ours": fastest_first}
    return found


def of_tiles(x: Tensor, weights: list[Tensor], theirs: Tensor, tiles: Tiles) -> dict[str, float]:
    """Returns the microseconds of a product by rlframe's kernel, and how far it is from another's result."""
    out = multiply(x, weights[0], None, tiles, dependent=True)
    apart = (out.float() - theirs.float()).norm() / theirs.float().norm()
    us = seconds(lambda: [multiply(x, weight, None, tiles, dependent=True) for weight in weights]) / len(weights) * 1e6
    return {"us": us, "apart": apart.item()}


def tried(columns: int, depth: int, *, search: bool) -> Iterator[Tiles]:
    """Yields the tiles that an engine would use, and with `search` others."""
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    yield tiles_for(columns, depth, processors=processors)
    if search:
        for each in itertools.product((16, 32, 64), (64, 128), (1, 2, 4, 8), (4, 8), (3, 4, 6)):
            tiles = Tiles(*each)
            if not depth % (tiles.parts * tiles.depth) and tiles.parts <= tiles.warps:
                yield tiles


if __name__ == "__main__":
    main()
