"""A layer of a dense model in a decode step of few sequences, beside cuBLAS and the device's memory. One GPU, of
compute capability 9.0 or newer.

    python examples/benchmarks/decode_layer.py --output result.json
    python examples/benchmarks/decode_layer.py qwen3_1p7b --search

All kernels of a layer run one after the other, as in an engine's CUDA graph: attention with its rotation and cache, and
what lies between two attentions, either as one kernel, or as four products with what Inductor makes of norms and gate.
Kernels begin while those ahead of them run, so that a product's time depends on its neighbours. Of each model and
batch: microseconds of a layer with the one kernel, with rlframe's products and with cuBLAS's, the least that reading
weights, keys and values takes by the read speed of the same run, and how far the results are apart. `--search` tries
other tiles of the products, one after the other.
"""

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before Inductor is imported: its kernels begin early, as in an engine.
os.environ.setdefault("TORCHINDUCTOR_ENABLE_PDL", "1")

import torch
from models_by_size import MODELS
from shared_attention import DEVICE, PAGE, Case, batch, read_speed, seconds
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from triton.runtime.errors import OutOfResources
from weight_sync import machine

from rlframe.rollout.vllm.attention.kernels import attend, keep
from rlframe.rollout.vllm.attention.plan import Plan
from rlframe.rollout.vllm.decode.between.launch import Layer, between
from rlframe.rollout.vllm.decode.few_rows import Tiles, multiply, tiles_for
from rlframe.rollout.vllm.decode.rotary import rotate

LAYERS, EPSILON = 7, 1e-6
"""Layers of a CUDA graph, each of more bytes than the GPU's cache holds."""
NAMES = ("qwen3_1p7b", "qwen3_4b", "qwen3_8b")
BATCHES = {
    "single": Case(groups=1, group=1, prompt=4096, mean=800),
    "one": Case(groups=1, prompt=4096, mean=500),
    "apart": Case(groups=8, group=1, prompt=4096, mean=800),
}
"""One sequence, eight of one prompt, and eight that share nothing."""
SEARCHED = ("single", "one")
WIDTHS, DEPTHS = (16, 32, 64, 128), ((64, 2), (64, 4), (64, 8), (128, 1), (128, 2))
"""Columns of a program; numbers of a part of the inner dimension, and parts."""
MEMORY = 224 << 10
"""Bytes of a multiprocessor for programs."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Weights of all layers."""

    heads: tuple[int, int]
    """Of queries, and of keys and values."""
    size: int
    products: dict[str, list[Tensor]]
    norms: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    """Of each layer: before attention, of queries, of keys, before the multilayer perceptron."""
    angles: Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """A batch and its cache."""

    x: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    plan: Plan
    caches: list[Tensor]
    tokens: int
    """Tokens whose keys and values are read."""


Product = Callable[[Tensor, Tensor, str], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", choices=[*NAMES, []], nargs="*")
    parser.add_argument("--search", action="store_true", help="other tiles too")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "read_bytes_per_s": read_speed(), "models": {}}
    for name in arguments.models or NAMES:
        model = model_of(MODELS[name])
        found = result["models"][name] = measured(model, result["read_bytes_per_s"])
        if arguments.search:
            found["searched"] = searched(model)
        print(name, json.dumps(found), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def model_of(config: dict[str, Any]) -> Model:
    """Returns random weights of a model's dimensions."""
    hidden, size, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "qkv": ((heads[0] + 2 * heads[1]) * size, hidden),
        "output": (hidden, heads[0] * size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }

    def weights(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5).bfloat16()

    def norm(width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, device=DEVICE)).bfloat16()

    return Model(
        heads=heads,
        size=size,
        products={name: [weights(*shape) for _ in range(LAYERS)] for name, shape in shapes.items()},
        norms=[(norm(hidden), norm(size), norm(size), norm(hidden)) for _ in range(LAYERS)],
        angles=torch.randn(8192, size, device=DEVICE).bfloat16(),
    )


def step_of(case: Case, model: Model) -> Step:
    """Returns a batch for a model."""
    query_heads, heads = model.heads
    tables, lengths, pages = batch(replace(case, heads=model.heads))
    last = lengths.long() - 1
    plan = Plan.of(
        max_rows=64,
        page=PAGE,
        heads=heads,
        query_heads=query_heads,
        width=model.size,
        processors=processors(),
        device=DEVICE,
    )
    plan.fill(tables, lengths)
    return Step(
        x=torch.randn(len(lengths), model.products["qkv"][0].shape[1], device=DEVICE).bfloat16(),
        positions=last,
        slots=tables.long().gather(1, (last // PAGE)[:, None])[:, 0] * PAGE + last % PAGE,
        tables=tables,
        plan=plan,
        caches=[torch.randn(pages, PAGE, heads, 2 * model.size, device=DEVICE).bfloat16() for _ in range(LAYERS)],
        tokens=int(lengths.sum()) - (case.group - 1) * case.groups * ((case.prompt - 1) // PAGE * PAGE),
    )


def processors() -> int:
    """Returns the number of the GPU's multiprocessors."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


@torch.compile(dynamic=False)
def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the norm of a sum, and the sum."""
    total = x + residual
    return rms_norm(total, weight.shape, weight, EPSILON), total


@torch.compile(dynamic=False)
def gated(x: Tensor) -> Tensor:
    """Returns the second half times SiLU of the first."""
    first, second = x.chunk(2, -1)
    return silu(first) * second


def attention(model: Model, step: Step, index: int, qkv: Tensor) -> Tensor:
    """Returns the result of a layer's attention [B, A]."""
    query_heads, heads = model.heads
    _, query_norm, key_norm, _ = model.norms[index]
    turned = rotate(qkv, step.positions, model.angles, query_norm, key_norm, query_heads, heads, EPSILON)
    query, key, value = (each.unflatten(1, (-1, model.size)) for each in (*turned, qkv[:, -heads * model.size :]))
    keys, values = step.caches[index].split(model.size, dim=-1)
    keep(key, value, keys, values, step.slots)
    attended = torch.empty_like(query)
    attend(step.plan, query, keys, values, step.tables, scale=model.size**-0.5, out=attended)
    return attended.flatten(1)


def layers(model: Model, step: Step, product: Product) -> Tensor:
    """Returns what the layers make of a batch, each product by itself."""
    x, residual = step.x, torch.zeros_like(step.x)
    for index, (first, _, _, second) in enumerate(model.norms):
        weights = {name: each[index] for name, each in model.products.items()}
        x, residual = add_norm(x, residual, first)
        attended = attention(model, step, index, product(x, weights["qkv"], "qkv"))
        x, residual = add_norm(product(attended, weights["output"], "output"), residual, second)
        x = product(gated(product(x, weights["gate_up"], "gate_up")), weights["down"], "down")
    return x + residual


def joined_layers(model: Model, step: Step) -> Tensor:
    """Returns what the layers make of a batch, with one kernel between two attentions."""
    products = model.products
    x, residual = add_norm(step.x, torch.zeros_like(step.x), model.norms[0][0])
    x = by_tiles(tiles_of(model))(x, products["qkv"][0], "qkv")
    for index in range(LAYERS):
        after = index + 1
        following = (model.norms[after][0], products["qkv"][after]) if after < LAYERS else (None, None)
        inner = (products["gate_up"][index], products["down"][index])
        layer = Layer(products["output"][index], model.norms[index][3], *inner, *following, None)
        x, residual = between(attention(model, step, index, x), residual, layer, EPSILON)
    return x + residual


def by_cublas(x: Tensor, weight: Tensor, name: str) -> Tensor:
    """Returns a product of cuBLAS."""
    return x @ weight.T


def by_tiles(tiles: dict[str, Tiles]) -> Product:
    """Returns products of rlframe's kernel."""
    return lambda x, weight, name: multiply(x, weight, None, tiles[name], dependent=True)


def tiles_of(model: Model) -> dict[str, Tiles]:
    """Returns the tiles that an engine would use."""
    return {name: tiles_for(len(each[0]), processors=processors()) for name, each in model.products.items()}


def measured(model: Model, speed: float) -> dict[str, Any]:
    """Returns the figures of a model."""
    tiles, found = tiles_of(model), {}
    weight_bytes = sum(each[0].nbytes for each in model.products.values())
    for name, case in BATCHES.items():
        step = step_of(case, model)
        ours, theirs = joined_layers(model, step).float(), layers(model, step, by_cublas).float()
        read = weight_bytes + step.tokens * model.heads[1] * 2 * model.size * 2
        found[name] = {
            "joined_us": microseconds(functools.partial(joined_layers, model, step)),
            "us": microseconds(functools.partial(layers, model, step, by_tiles(tiles))),
            "cublas_us": microseconds(functools.partial(layers, model, step, by_cublas)),
            "floor_us": read / speed * 1e6,
            "apart": ((ours - theirs).norm() / theirs.norm()).item(),
        }
    return {"tiles": {name: tuple(each) for name, each in tiles.items()}, "batches": found}


def microseconds(run: Callable[[], Tensor]) -> float:
    """Returns those of a layer, the best of three."""
    return min(seconds(run) for _ in range(3)) / LAYERS * 1e6


def searched(model: Model) -> dict[str, Any]:
    """Returns the best tiles of each product beside the best of the others, by the mean of SEARCHED's batches."""
    steps = [step_of(BATCHES[name], model) for name in SEARCHED]

    def mean_us(tiles: dict[str, Tiles]) -> float:
        runs = [functools.partial(layers, model, step, by_tiles(tiles)) for step in steps]
        return sum(map(microseconds, runs)) / len(runs)

    tiles, found = tiles_of(model), {}
    least = mean_us(tiles)
    for name in ("gate_up", "down", "qkv", "output"):
        tried = {}
        for other in dict.fromkeys(tried_tiles(*model.products[name][0].shape)):
            try:
                tried[other] = mean_us(tiles | {name: other})
            except OutOfResources:
                continue
        best = min(tried, key=tried.__getitem__)
        if tried[best] < least:
            least, tiles[name] = tried[best], best
        fastest = sorted(tried.items(), key=lambda item: item[1])[:6]
        found[name] = {str(tuple(each)): us for each, us in fastest}
        print(name, least, json.dumps(found[name]), flush=True)
    return found


def tried_tiles(columns: int, depth: int) -> Iterator[Tiles]:
    """Yields ways to divide a product, each with as many stages as fit when a multiprocessor has no more programs than
    it must have, or one more."""
    for width, (at_once, parts), more in itertools.product(WIDTHS, DEPTHS, (0, 1)):
        programs = -(-columns // width)
        each = -(-programs // processors()) + more
        stages = MEMORY // each // ((16 + width) * at_once * parts * 2) + 1
        fits = stages >= 3 and not depth % (at_once * parts)
        if fits and processors() <= 2 * programs <= 12 * processors():
            yield Tiles(width, at_once, parts, max(parts, 4), min(stages, depth // (at_once * parts) + 1, 12))


if __name__ == "__main__":
    main()
