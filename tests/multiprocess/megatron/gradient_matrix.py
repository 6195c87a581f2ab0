"""Cells of the gradient matrix: what to measure on which ranks, what transformers has for it, and how far off it is.

A setup is a layout, a model and a kind of recomputation: it needs a new model on every rank. The cells of a setup share
it; they differ in the loss, its aggregation and the split into micro-batches, or carry a mutation that must show. Every
number of ranks is started once, and measures all its setups.
"""

import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.sft import Sft, SftConfig
from rlframe.cluster.config import Device
from rlframe.megatron.config.options import MoeConfig, Recompute, RecomputeConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, OptimizerConfig, TrainConfig
from rlframe.megatron.messages.microbatch import Microbatch, split
from rlframe.models.config import ModelConfig
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.packing import stretch
from rlframe.types.batch import Batch, Sequences, TrainBatch
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.forced_routes import ROUTES, force_routes, make_routes
from tests.tiny_models import make, on_disk

LENGTHS = [5, 17, 2, 9, 30, 1, 12, 6]
"""Two rollouts for each of four prompts."""
CONSTANT_LENGTH = 20
TEMPERATURE = 0.8
GRPO = {"clip_low": 0.2, "clip_high": 0.3, "kl_coefficient": 0.05, "entropy_coefficient": 0.01, "group_size": 2}
MODELS = {"dense": ("qwen3", {})} | dict.fromkeys(("moe", "replayed"), ("qwen3_moe", {"mlp_only_layers": [1]}))
"""Four layers each; those with experts have one dense layer, and their embedding for an output layer. The routers of
the last one choose what its batch says, at random, and so do transformers'."""
LIMITS_S = {Device.CPU: 240.0, Device.CUDA: 540.0}
"""For all setups of a number of ranks."""
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "initializer_range": 0.106}
"""On GPUs: what the one kernel for all experts' products can cut, with activations as large as at a width of 64."""
WHOLE, BUDGET, SINGLE = "whole", "budget", "single"
"""Splits into micro-batches: one per rank, packed up to 31 tokens, or each sequence alone."""


@dataclass(frozen=True)
class Cell:
    """One loss and its gradient."""

    loss: str
    """grpo or sft."""
    aggregation: Aggregation
    split: str
    mutation: str = ""
    """What is done wrong on purpose, see `mutated`; nothing when empty."""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.mutation, self.loss, str(self.aggregation), self.split]))


@dataclass(frozen=True)
class Setup:
    """A model on all ranks of a layout."""

    parallel: Parallel
    model: str
    cells: tuple[Cell, ...] = field(repr=False)
    recompute: Recompute = Recompute.NONE

    def __str__(self) -> str:
        again = {Recompute.NONE: "", Recompute.FULL: " recompute", Recompute.SELECTIVE: " recompute experts"}
        return f"{self.model} {self.parallel}{again[self.recompute]}"

    @property
    def settings(self) -> dict[str, Any]:
        """Of TrainConfig."""
        modules = ["moe"] if self.recompute is Recompute.SELECTIVE else []
        return {
            "parallel": self.parallel,
            "recompute": self.recompute,
            "recompute_options": RecomputeConfig(modules=modules),
            "moe": MoeConfig(router_replay=self.model == "replayed"),
        }


ROLLOUT_AGGREGATIONS = (Aggregation.PROMPT_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM)
"""Not for sft."""
SFT_AGGREGATIONS = tuple(each for each in Aggregation if each not in ROLLOUT_AGGREGATIONS)
LOSSES = [("grpo", each) for each in Aggregation] + [("sft", each) for each in SFT_AGGREGATIONS]
EVERY_CELL = tuple(Cell(*loss, how) for loss in LOSSES for how in (WHOLE, BUDGET, SINGLE))
CELLS_PER_SETUP = 4


def setups() -> list[Setup]:
    """One rank measures every cell; each further setup the next few, so that every loss meets layouts of every kind."""
    both = ("dense", "moe")
    layouts: list[tuple[Any, tuple[str, ...], Recompute]] = [
        ("d2", both, Recompute.NONE),
        ("t2", both, Recompute.FULL),
        ("p2", both, Recompute.NONE),
        ("p2v2", both, Recompute.FULL),
        ({"pp": 2, "first_stage_layers": 1}, both, Recompute.NONE),
        ("c2", both, Recompute.NONE),
        ("d2e2", ("moe",), Recompute.FULL),
        ("t2e2", ("moe",), Recompute.NONE),
        # Experts cut by tensor parallelism.
        ("t2|ffn:t2", ("moe",), Recompute.NONE),
        # Four ranks: two axes and three; from the middle on with another shape for the experts than for attention.
        ("t2p2v2", both, Recompute.NONE),
        ("t2c2", both, Recompute.FULL),
        ("d2c2", both, Recompute.NONE),
        ("c2p2v2", ("dense",), Recompute.NONE),
        ({"pp": 2, "pipeline_layout": "E|ttt|t|L", "dp": 2}, both, Recompute.NONE),
        ({"pp": 2, "dp": 2, "ep": 2, "last_stage_layers": 1}, ("moe",), Recompute.FULL),
        ("t2c2|ffn:e4", ("moe",), Recompute.NONE),
        ("t2p2|ffn:p2e2", ("moe",), Recompute.NONE),
        ("d2t2|ffn:t2e2", ("moe",), Recompute.NONE),
        ("d2t2e2", ("moe",), Recompute.FULL),
        ("c2p2|ffn:p2e2", ("moe",), Recompute.FULL),
    ]
    found = [Setup(Parallel(), "dense", EVERY_CELL), Setup(Parallel(), "moe", EVERY_CELL, Recompute.FULL)]
    cells = itertools.cycle(EVERY_CELL[::7] + EVERY_CELL[3::7] + EVERY_CELL[5::7])
    for layout, names, recompute in layouts:
        for name in names:
            parallel = Parallel(**layout) if isinstance(layout, dict) else Parallel.parse(layout)
            found.append(Setup(parallel, name, tuple(itertools.islice(cells, CELLS_PER_SETUP)), recompute))
    joined: dict[tuple[Parallel, str, Recompute], list[Cell]] = {}
    for setup in found + replayed_setups() + mutated_setups():
        joined.setdefault((setup.parallel, setup.model, setup.recompute), []).extend(setup.cells)
    return [Setup(parallel, model, tuple(cells), how) for (parallel, model, how), cells in joined.items()]


def replayed_setups() -> list[Setup]:
    """Every way to cut the tokens and the layers whose routers replay, and to compute them again."""
    loss = ("grpo", Aggregation.SEQ_MEAN_TOKEN_MEAN)
    right, mutations = (Cell(*loss, SINGLE),), tuple(Cell(*loss, BUDGET, mutation) for mutation in ROUTES)
    layouts: list[tuple[str, Recompute, tuple[Cell, ...]]] = [
        ("d1", Recompute.FULL, right),
        ("p2v2", Recompute.SELECTIVE, right),
        ("t2c2|ffn:e4", Recompute.NONE, right + mutations),
        ("t2p2", Recompute.FULL, right),
    ]
    return [Setup(Parallel.parse(layout), "replayed", cells, how) for layout, how, cells in layouts]


def mutated_setups() -> list[Setup]:
    """Each mutation where it can be made."""

    def cells(*mutations: str) -> tuple[Cell, ...]:
        return tuple(
            Cell(*loss, BUDGET, mutation)
            for mutation in mutations
            for loss in (("grpo", Aggregation.SEQ_MEAN_TOKEN_MEAN), ("sft", Aggregation.TOKEN_MEAN))
        )

    return [
        Setup(Parallel(dp=2), "dense", cells("wrong_denominator", "dropped_mask", "missing_sum")),
        Setup(Parallel(cp=2), "dense", cells("missing_sum")),
        Setup(Parallel(dp=2, ep=2), "moe", cells("swapped_expert", "missing_sum")),
        Setup(Parallel.parse("t2c2|ffn:e4"), "moe", cells("swapped_expert", "wrong_denominator", "dropped_mask")),
    ]


def algorithm(cell: Cell) -> Algorithm:
    """The loss of the cell, as the trainer gets it."""
    if cell.loss == "sft":
        return Sft(SftConfig(aggregation=cell.aggregation))
    normed = cell.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    return Grpo(GrpoConfig(aggregation=cell.aggregation, constant_length=CONSTANT_LENGTH if normed else None, **GRPO))


# The reference: transformers' logits, one sequence at a time, and losses spelled out


def logprobs_and_entropies(model: Any, batch: Sequences) -> tuple[Tensor, Tensor]:
    """[T] each, 0 at first tokens."""
    logprobs, entropies = [], []
    chosen = [None] * len(LENGTHS) if batch.routes is None else batch.routes.split(LENGTHS)
    for row, routes in zip(batch.token_ids.split(LENGTHS), chosen, strict=True):
        force_routes(model, routes)
        table = torch.log_softmax(model(row[None]).logits[0].float() / TEMPERATURE, -1)[:-1]
        logprobs += [torch.zeros(1), table.gather(1, row[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(table.exp() * table).sum(1)]
    return torch.cat(logprobs), torch.cat(entropies)


def make_batch(model: Any, *, routes: Tensor | None = None) -> TrainBatch:
    """Rollouts whose probability ratios lie inside and outside of the clip range, on both sides.

    The bounds are log 0.8 = -0.22 and log 1.3 = 0.26 nats. No token is near one: in bfloat16 it would be clipped or not
    by chance, and its whole gradient with it.
    """
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return torch.randn(total, generator=generator) * scale

    lengths = torch.tensor(LENGTHS)
    mask = torch.rand(total, generator=generator) < 0.7
    mask[torch.cumsum(lengths, 0) - lengths] = False
    batch = Batch(
        token_ids=torch.randint(0, 67, (total,), generator=generator),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(total),
        group=torch.arange(len(LENGTHS)) // 2,
        rewards=torch.randn(len(LENGTHS), generator=generator),
        versions=torch.zeros(sum(LENGTHS), dtype=torch.int64),
        routes=routes,
    )
    with torch.no_grad():
        logprobs, _ = logprobs_and_entropies(model, batch)
    batch.rollout_logprobs = (logprobs + noise(0.1)) * mask
    shifts = torch.tensor([-0.8, -0.03, 0.03, 0.8])
    batch.old_logprobs = logprobs + shifts[torch.randint(0, len(shifts), (total,), generator=generator)]
    batch.reference_logprobs = logprobs + noise(0.5)
    return batch.with_advantages(torch.randn(total, generator=generator) * mask)


def token_losses(loss: str, batch: TrainBatch, logprobs: Tensor, entropies: Tensor) -> Tensor:
    """[T] -logp for sft; for grpo -min(r A, clip(r) A) + beta (e^d - d - 1) - c H, with d = log pi_ref - log pi."""
    if loss == "sft":
        return -logprobs
    assert batch.old_logprobs is not None and batch.reference_logprobs is not None
    ratio = (logprobs - batch.old_logprobs).exp()
    clipped = ratio.clamp(1 - GRPO["clip_low"], 1 + GRPO["clip_high"])
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    gap = batch.reference_logprobs - logprobs
    kl = gap.exp() - gap - 1
    return -surrogate + GRPO["kl_coefficient"] * kl - GRPO["entropy_coefficient"] * entropies


def aggregate(losses: Tensor, batch: TrainBatch, mode: Aggregation) -> Tensor:
    """One number, by the sentence that defines each mode."""
    pieces = [piece[mask] for piece, mask in zip(losses.split(LENGTHS), batch.loss_mask.split(LENGTHS), strict=True)]
    count = len(pieces)
    if mode is Aggregation.TOKEN_SUM:
        return torch.cat(pieces).sum()
    if mode is Aggregation.TOKEN_MEAN:
        return torch.cat(pieces).mean()
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
        return sum(piece.sum() for piece in pieces) / count
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        return sum(piece.sum() for piece in pieces) / count / CONSTANT_LENGTH
    if mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return sum(piece.mean() for piece in pieces if len(piece)) / count
    prompts = [torch.cat(pieces[first : first + 2]) for first in range(0, count, 2)]
    return sum(prompt.mean() for prompt in prompts if len(prompt)) / len(prompts)


@dataclass(frozen=True)
class Reference:
    """What transformers has for a loss."""

    loss: float
    scale: float
    """The loss with every token's share made positive: what its rounding errors are measured by."""
    gradients: dict[str, Tensor]
    """Whole tensors by Hugging Face name."""


@dataclass(frozen=True)
class Expected:
    """What transformers has for a model."""

    batch: TrainBatch
    logprobs: Tensor
    """[T]"""
    losses: dict[tuple[str, Aggregation], Reference]


def expectation(name: str, folder: pathlib.Path, dtype: torch.dtype, device: Device) -> Expected:
    """Writes the model to `folder`, its weights rounded to `dtype`, and computes with them in float32."""
    kind, changes = MODELS[name]
    wide = WIDE if device is Device.CUDA and name != "dense" else {}
    model = make(kind, folder, num_hidden_layers=4, **changes | wide).to(dtype)
    model.save_pretrained(folder)
    model = model.float()
    batch, found = make_batch(model, routes=make_routes(model, sum(LENGTHS)) if name == "replayed" else None), {}
    logprobs, entropies = logprobs_and_entropies(model, batch)
    for loss, mode in LOSSES:
        value = aggregate(token_losses(loss, batch, logprobs, entropies), batch, mode)
        model.zero_grad()
        value.backward(retain_graph=True)
        gradients: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            gradients |= on_disk(name, parameter.grad.clone())
        losses = token_losses(loss, batch, logprobs.detach(), entropies.detach())
        scale = float(aggregate(losses.abs(), batch, mode))
        found[loss, mode] = Reference(float(value.detach()), scale, gradients)
    return Expected(batch, logprobs.detach(), found)


# What a rank does


def on_rank(
    rank: int,
    init_method: str,
    setups: list[Setup],
    folders: dict[str, str],
    batches: dict[str, TrainBatch],
    device: Device,
    dtype: Dtype,
) -> list[dict[str, Any]]:
    """What this rank has to show for each setup, one model after another in one process."""
    if device is Device.CUDA:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        # Transformer Engine multiplies float32 as TF32, of 10 bits, where cuBLAS lets it.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    from rlframe.megatron.cpu import platform  # noqa: PLC0415 - the platform must be installed before Megatron

    where = platform.resolve(device)
    platform.install(where)
    from rlframe.megatron.worker import environment, parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    results = []
    for index, setup in enumerate(setups):
        batch = batches[setup.model]
        train = TrainConfig(dtype=dtype, optimizer=OptimizerConfig(lr=1e-3), **setup.settings)
        environment.prepare(train)
        trainer = Trainer(TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=where, model=ModelConfig(path=folders[setup.model]),
            train=train, seed=0, temperature=TEMPERATURE, total_optimizer_steps=1, timeout_s=60, with_reference=False,
        ))  # fmt: skip
        results.append({"cells": [measure(trainer, cell, batch) for cell in setup.cells]} | facts(trainer, batch))
        parallel.shutdown()
    return results


def facts(trainer: Any, batch: TrainBatch) -> dict[str, Any]:
    """What this rank is, holds and exports, its logprobs, and the norm of the gradient that an optimizer step sees."""
    cell = EVERY_CELL[0]
    dp = Parallel.parse(trainer.setup.train.parallel).dp
    ranks, plan = split(batch, algorithm(cell).token_weights(batch), num_ranks=dp, max_tokens=40)
    mine = ranks[trainer.coordinates.dp_rank].microbatches()
    return {
        "where": trainer.coordinates,
        "shards": trainer.model.shards,
        "shapes": {name: tuple(value.shape) for name, value in trainer.model.parameters.items()},
        "layout": trainer.layout,
        "plan": plan,
        "weights": trainer.export(list(trainer.layout.tensors), torch.float32),
        "logprobs": trainer.logprobs(mine, reference=False),
        "grad_norm": trainer.train([mine], algorithm(cell), first_step=0)[0]["train/grad_norm"].value,
    }


def measure(trainer: Any, cell: Cell, batch: TrainBatch) -> dict[str, Any]:
    """This rank's part of one cell."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see on_rank

    dp = Parallel.parse(trainer.setup.train.parallel).dp
    with mutated(trainer, cell) as weights_of:
        mine = shares(batch, weights_of(batch), dp, cell.split)[trainer.coordinates.dp_rank]
        if cell.mutation in ROUTES:
            change = ROUTES[cell.mutation]
            mine = [replace(each, batch=replace(each.batch, routes=change(each.batch.routes))) for each in mine]
        if cell.mutation == "wrong_denominator":
            mine = [replace(each, weights=weights_of(each.batch)) for each in mine]
        metrics = forward.accumulate_gradients(trainer.model, mine, algorithm(cell), temperature=TEMPERATURE)
        gradients = exported_gradients(trainer)
    reports = trainer.coordinates.reports
    return {"loss": sum(each["train/loss"].value for each in metrics) if reports else 0.0, "gradients": gradients}


@contextmanager
def mutated(trainer: Any, cell: Cell) -> Iterator[Any]:
    """The mutation of the cell on this rank, if it has one; gives the function from a batch to its token weights."""
    weights_of, config = algorithm(cell).token_weights, trainer.model.config
    if cell.mutation == "dropped_mask":
        yield lambda batch: weights_of(replace(batch, loss_mask=torch.ones_like(batch.loss_mask)))
    elif cell.mutation == "missing_sum":
        right, config.finalize_model_grads_func = config.finalize_model_grads_func, lambda *_, **__: None
        yield weights_of
        config.finalize_model_grads_func = right
    elif cell.mutation == "swapped_expert":
        swap_experts(trainer.model.parameters)
        yield weights_of
        swap_experts(trainer.model.parameters)
    else:
        yield weights_of


def swap_experts(parameters: dict[str, Tensor]) -> None:
    """Exchanges the first two experts that this rank has in its first layer with experts."""
    name = next(name for name in parameters if "local_experts.0.linear_fc1" in name)
    for one in (name, name.replace("fc1", "fc2")):
        first, second = parameters[one], parameters[one.replace("local_experts.0.", "local_experts.1.")]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def shares(batch: TrainBatch, weights: Tensor, dp: int, how: str) -> list[list[Microbatch]]:
    """Micro-batches by data-parallel rank."""
    if how != SINGLE:
        parts, _ = split(batch, weights, num_ranks=dp, max_tokens=31 if how == BUDGET else batch.num_tokens)
        return [part.microbatches() for part in parts]
    count = -(-batch.num_sequences // dp)
    plan = [stretch([[i] for i in range(first, batch.num_sequences, dp)], count) for first in range(dp)]
    pieces = weights.split(LENGTHS)
    return [
        [
            Microbatch(batch=batch.select(own), weights=torch.cat([pieces[i] for i in own]) if own else weights[:0])
            for own in rank
        ]
        for rank in plan
    ]


def exported_gradients(trainer: Any) -> dict[str, list]:
    """The rank's gradients through the recorded layout, so by Hugging Face name. Data-parallel sums are in place, but
    the distributed optimizer leaves each rank only its own shard of the sum: gather them."""
    from rlframe.megatron.model.model import named_parameters  # noqa: PLC0415 - see on_rank

    chunks = trainer.model.chunks
    for buffer in (each for chunk in chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        group = buffer.data_parallel_group
        if group.size() > 1:
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                torch.distributed.all_gather(shards, shards[group.rank()].clone(), group=group)
    gradients = {name: parameter.main_grad for name, parameter in named_parameters(chunks).items()}
    return {
        name: [(tuple(box.region), box.view(gradients).to("cpu", copy=True)) for box in boxes]
        for name, boxes in trainer.layout.boxes.items()
        if boxes[0].parameter in gradients
    }


# The comparison


def run(
    setups: list[Setup], folders: dict[str, pathlib.Path], *, device: Device, dtype: Dtype, worlds: list[int]
) -> tuple[dict[str, Expected], dict[Setup, list[dict[str, Any]]]]:
    """What transformers has for each model, and what the ranks of each setup have to show."""
    expected = {name: expectation(name, folder, getattr(torch, dtype), device) for name, folder in folders.items()}
    paths = {name: str(folder) for name, folder in folders.items()}
    batches = {name: each.batch for name, each in expected.items()}
    measured = {}
    for world in worlds:
        chosen = [setup for setup in setups if setup.parallel.world == world]
        # Each shape's kernels are looked for once on a GPU.
        ranks = run_distributed(on_rank, world, chosen, paths, batches, device, dtype, timeout_s=LIMITS_S[device])
        measured |= {setup: [rank[index] for rank in ranks] for index, setup in enumerate(chosen)}
    return expected, measured


def assemble(results: list[dict[str, Any]], key: str, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks, every element covered."""
    whole = {}
    for name, shape in shapes.items():
        tensor = torch.full(shape, torch.nan)
        matrix = tensor.view(-1, shape[-1])
        for result in results:
            for (row, rows, col, cols), values in result[key].get(name, ()):
                matrix[row : row + rows, col : col + cols] = values
        assert not tensor.isnan().any(), f"{name} is not covered"
        whole[name] = tensor
    return whole


def greatest(error: Tensor) -> float:
    """The greatest element, whatever its sign."""
    return float(error.abs().max())


def deviations(
    results: list[dict[str, Any]],
    reference: Reference,
    size: Callable[[Tensor], float] = greatest,
    part_of: Callable[[str], str] = str,
) -> dict[str, float]:
    """How far the loss and each tensor's gradient are off, by name: the size of the error over that of the reference.

    Errors of the loss are measured by its `scale`. A tensor whose gradient is less than a thousandth of the greatest
    one's (an expert that few tokens reach has hardly any) is measured by that thousandth. Tensors for which `part_of`
    has the same name are measured as one.
    """
    gradients = reference.gradients
    summed = assemble(results, "gradients", {name: value.shape for name, value in gradients.items()})
    parts: dict[str, list[str]] = {}
    for name in gradients:
        parts.setdefault(part_of(name), []).append(name)
    wanted, errors = {}, {}
    for part, names in parts.items():
        wanted[part] = torch.cat([gradients[name].flatten() for name in names])
        errors[part] = torch.cat([summed[name].flatten() for name in names]) - wanted[part]
    floor = 1e-3 * max(size(value) for value in wanted.values())
    found = {part: size(error) / max(size(wanted[part]), floor) for part, error in errors.items()}
    return found | {"loss": abs(sum(result["loss"] for result in results) - reference.loss) / reference.scale}
