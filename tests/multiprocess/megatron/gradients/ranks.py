"""What a rank measures of the cells of its setups."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlframe.cluster.config import Device
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import Microbatch, split
from rlframe.models.config import ModelConfig
from rlframe.ops import prefixes
from rlframe.ops.packing import stretch
from rlframe.types.batch import TrainBatch
from tests.multiprocess.megatron.forced_routes import ROUTES
from tests.multiprocess.megatron.gradients.cells import (
    BUDGET,
    EVERY_CELL,
    LENGTHS,
    SHARED_MUTATIONS,
    SINGLE,
    TEMPERATURE,
    Cell,
    Setup,
    algorithm,
)


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

    if os.environ.get("TRITON_INTERPRET") == "1":
        with_query_key_kernels()
    # However few tokens two rollouts have in common.
    prefixes.FEWEST_TOKENS = 1
    results = []
    for index, setup in enumerate(setups):
        batch = batches[setup.model]
        train = TrainConfig(dtype=dtype, optimizer=OptimizerConfig(lr=1e-3), **setup.settings)
        environment.prepare(train)
        trainer = Trainer(TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=where,
            model=ModelConfig(path=folders[setup.model], float32_logits=setup.float32_logits), train=train,
            seed=0, temperature=TEMPERATURE, total_optimizer_steps=1, timeout_s=60, with_reference=False,
        ))  # fmt: skip
        results.append({"cells": [measure(trainer, cell, batch) for cell in setup.cells]} | facts(trainer, batch))
        parallel.shutdown()
    return results


def with_query_key_kernels() -> None:
    """Gives the CPU's layers the attention of a GPU's, whose kernels go through Triton's interpreter."""
    from rlframe.megatron.model import transformer  # noqa: PLC0415 - as above
    from rlframe.megatron.model.layers.head_norm import HeadNorm  # noqa: PLC0415
    from rlframe.megatron.model.layers.query_key import QueryKeyAttention, turns_whole_heads  # noqa: PLC0415

    local_layer = transformer.local_layer

    def layer(architecture: Any, config: Any, index: int) -> Any:
        spec = local_layer(architecture, config, index)
        assert turns_whole_heads(architecture, tp=config.tensor_model_parallel_size) and architecture.qk_norm
        attention = spec.submodules.self_attention
        attention.module = QueryKeyAttention
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = HeadNorm
        return spec

    transformer.local_layer = layer


def facts(trainer: Any, batch: TrainBatch) -> dict[str, Any]:
    """What this rank is, holds and exports, its logprobs, those that the training pass returns of every other sequence,
    and the norm of the gradient that an optimizer step sees."""
    cell = EVERY_CELL[0]
    batch = replace(batch, kept=torch.arange(batch.num_sequences) % 2 == 0)
    dp = Parallel.parse(trainer.setup.train.parallel).dp
    share = trainer.setup.train.share_prompts
    ranks, plan = split(batch, algorithm(cell).token_weights(batch), num_ranks=dp, max_tokens=40, share_prompts=share)
    mine = ranks[trainer.coordinates.dp_rank].microbatches()
    weights = trainer.export(list(trainer.layout.tensors), torch.float32)
    logprobs = trainer.logprobs(mine, reference=False)
    update = trainer.train([mine], algorithm(cell), first_step=0)[0]
    return {
        "where": trainer.coordinates,
        "shards": trainer.model.shards,
        "shapes": {name: tuple(value.shape) for name, value in trainer.model.parameters.items()},
        "layout": trainer.layout,
        "plan": plan,
        "weights": weights,
        "logprobs": logprobs,
        "kept_logprobs": update.kept_logprobs,
        "grad_norm": update.metrics["train/grad_norm"].value,
    }


def measure(trainer: Any, cell: Cell, batch: TrainBatch) -> dict[str, Any]:
    """This rank's part of one cell."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see on_rank

    dp = Parallel.parse(trainer.setup.train.parallel).dp
    with mutated(trainer, cell) as weights_of:
        share = trainer.setup.train.share_prompts
        mine = shares(batch, weights_of(batch), dp, cell.split, share_prompts=share)[trainer.coordinates.dp_rank]
        if cell.mutation in ROUTES:
            change = ROUTES[cell.mutation]
            mine = [replace(each, batch=replace(each.batch, routes=change(each.batch.routes))) for each in mine]
        if cell.mutation == "wrong_denominator":
            mine = [replace(each, weights=weights_of(each.batch)) for each in mine]
        passes = forward.accumulate_gradients(trainer.model, mine, algorithm(cell), temperature=TEMPERATURE)
        gradients = exported_gradients(trainer)
    reports = trainer.coordinates.reports
    loss = sum(each.metrics["train/loss"].value for each in passes) if reports else 0.0
    return {"loss": loss, "gradients": gradients}


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
    elif cell.mutation in SHARED_MUTATIONS:
        with wrongly_shared(cell.mutation):
            yield weights_of
    elif cell.mutation == "without_bounds":
        with without_bounds():
            yield weights_of
    elif cell.mutation == "swapped_expert":
        swap_experts(trainer.model.parameters)
        yield weights_of
        swap_experts(trainer.model.parameters)
    else:
        yield weights_of


@contextmanager
def wrongly_shared(mutation: str) -> Iterator[None]:
    """Shared keys have the gradient of the first rollout only, or every rollout's positions begin at its own tokens."""
    from rlframe.megatron.packed import shared_prompts  # noqa: PLC0415 - see on_rank

    def first_only(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.shared.keys.tolist()
        first = torch.tensor([rows.index(row) for row in range(len(ctx.shared.positions))])
        return grad[first], None

    def from_zero(cls: Any, rows: Tensor, positions: Tensor, lengths: Tensor, bounds: Tensor) -> Any:
        found = right.__func__(cls, rows, positions, lengths, bounds)
        rows = torch.arange(int(bounds[-1]), device=bounds.device)
        return replace(found, positions=rows - torch.repeat_interleave(bounds[:-1].long(), bounds.diff()))

    kind, name, wrong = {
        "prompt_of_the_first_only": (shared_prompts.TakeRows, "backward", staticmethod(first_only)),
        "positions_from_zero": (shared_prompts.SharedPrompts, "of", classmethod(from_zero)),
    }[mutation]
    right = kind.__dict__[name]
    setattr(kind, name, wrong)
    yield
    setattr(kind, name, right)


@contextmanager
def without_bounds() -> Iterator[None]:
    """The sequences that are whole on a rank are one."""
    from rlframe.megatron.packed import inputs  # noqa: PLC0415 - see on_rank

    right = inputs.PackedInputs.__dict__["_whole"]

    def wrong(cls: Any, *arguments: Any) -> Any:
        found = right.__func__(cls, *arguments)
        packing = inputs.packing_of(found.packing.cu_seqlens_q[[0, -1]], padded=False)
        packing.local_cp_size = 1
        return replace(found, packing=packing)

    inputs.PackedInputs._whole = classmethod(wrong)
    yield
    inputs.PackedInputs._whole = right


def swap_experts(parameters: dict[str, Tensor]) -> None:
    """Exchanges the first two experts that this rank has in its first layer with experts."""
    name = next(name for name in parameters if "local_experts.0.linear_fc1" in name)
    for one in (name, name.replace("fc1", "fc2")):
        first, second = parameters[one], parameters[one.replace("local_experts.0.", "local_experts.1.")]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def shares(
    batch: TrainBatch, weights: Tensor, dp: int, how: str, *, share_prompts: bool = False
) -> list[list[Microbatch]]:
    """Micro-batches by data-parallel rank."""
    if how != SINGLE:
        budget = 31 if how == BUDGET else batch.num_tokens
        parts, _ = split(batch, weights, num_ranks=dp, max_tokens=budget, share_prompts=share_prompts)
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
