"""Rules about the policy's model, its layout and its adapters."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from rlframe.megatron.config.lora import faults as lora_faults
from rlframe.megatron.config.lora import trained as lora_trained
from rlframe.megatron.config.parallel import Parallel
from rlframe.models import adapters, hub, inspection, remote_code, shards, tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Architecture, Family
from rlframe.run.check.context import architecture_of
from rlframe.run.config import RunConfig
from rlframe.utils.errors import CheckpointError
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.boxes import in_one_run
from rlframe.weight_sync.layout.memory import MemoryLayout, record


def model(run: RunConfig) -> list[Fault]:
    """Checks that the model exists, has a family, and has heads that allow rotary positions."""
    architecture, faults = architecture_of(run)
    if architecture and architecture.head_dim % 2:
        return [Fault("model.path", said=f"head_dim must be even for rotary positions, got {architecture.head_dim}")]
    return faults


def files(run: RunConfig) -> list[Fault]:
    """Checks that the weights match config.json and that the tokenizer fits them."""
    architecture, _ = architecture_of(run)
    if architecture is None:
        return []
    if run.model.trust_remote_code and not remote_code.named(hub.resolve(run.model)):
        why = f"neither config.json nor tokenizer_config.json of {run.model.path} names code in its auto_map"
        return [Fault(remote_code.KEY, "has no effect", got=True, why=why, hint="remove it")]
    outputs, mtp = architecture.num_outputs, run.train.mtp.keeps
    return file_faults(run.model, architecture, num_outputs=outputs, key="model.path", with_mtp=mtp)


def file_faults(
    model: ModelConfig, architecture: Architecture, *, num_outputs: int | None, key: str, with_mtp: bool = False
) -> list[Fault]:
    """Returns the faults of the files of a model whose config.json was read successfully.

    Args:
        num_outputs: number of outputs of its head, as in `Architecture`.
        key: dotted key of its path, for the messages.
        with_mtp: see `inspection.model_faults`.
    """
    folder = hub.resolve(model)
    found: list[str] = []
    try:
        found += tokenizer.faults(folder, vocab_size=architecture.vocab_size)
        if not model.random_init:
            found += inspection.model_faults(folder, num_outputs=num_outputs, with_mtp=with_mtp)
    except CheckpointError as error:
        found.append(str(error))
    return [Fault(key, said=fault) for fault in found]


def parallel(run: RunConfig) -> Iterator[Fault]:
    """Checks that the layout divides the model."""
    architecture, _ = architecture_of(run)
    parallel = Parallel.parse(run.train.parallel)
    if architecture:
        yield from shards.faults(architecture, **asdict(parallel), **asdict(run.train.context_parallel))


def lora(run: RunConfig) -> Iterator[Fault]:
    """Checks that adapters match some matrices, and that an adapter to continue from has these settings."""
    lora, (architecture, _) = run.train.lora, architecture_of(run)
    if lora is None or architecture is None:
        return
    family, parallel = hub.load_family(hub.resolve(run.model)), Parallel.parse(run.train.parallel)
    tensors = family.tensors(architecture)
    boxes = layout_of_first_rank(family, architecture).boxes
    homes = {name: pieces[0].parameter for name, pieces in boxes.items()}
    yield from lora_faults(
        lora,
        homes,
        {name: len(shape) for name, shape in tensors.items()},
        vocabulary_fits=architecture.vocab_size % parallel.tp == 0,
    )
    heads = [name for name in tensors if homes[name].endswith("output_layer.weight")]
    if run.train.logits_chunk_tokens and any(lora.adapts(name, homes[name], dimensions=2) for name in heads):
        yield Fault(
            "train.logits_chunk_tokens",
            f"must be null with an adapter of {heads[0]}, which adds to all logits at once",
            got=run.train.logits_chunk_tokens,
            hint="or put lm_head into train.lora.exclude_modules",
        )
    if run.model.float32_logits and any(lora.adapts(name, homes[name], dimensions=2) for name in heads):
        yield Fault(
            "model.float32_logits",
            f"must be false with an adapter of {heads[0]}",
            got="true",
            why="what the adapter adds to the logits would be rounded",
            hint="or put lm_head into train.lora.exclude_modules",
        )
    adapted = [name for name, shape in tensors.items() if lora.adapts(name, homes[name], dimensions=len(shape))]
    if parallel.tp > 1 and not list(shards.faults(architecture, tp=parallel.tp)):
        yield from _in_pieces(adapted, layout_of_first_rank(family, architecture, tp=parallel.tp), tp=parallel.tp)
    if lora.path is None:
        return
    expected = {adapters.key(name, half): shape for name, half, shape in lora_trained(lora, homes, tensors)}
    same = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "tied": architecture.tie_embeddings}
    try:
        for fault in adapters.faults(Path(lora.path), expected, **same):
            yield Fault("train.lora.path", f"{fault}", got=lora.path, stated=True)
    except CheckpointError as error:
        yield Fault("train.lora.path", said=error)


def _in_pieces(adapted: list[str], layout: MemoryLayout, *, tp: int) -> Iterator[Fault]:
    """Rejects adapters of matrices of which a rank of a tensor-parallel group holds rows from several places."""
    found = [name for name in adapted if not in_one_run(layout.boxes.get(name, ()))]
    if found:
        modules = sorted({name.split(".")[-2] for name in found})
        yield Fault(
            "train.lora.exclude_modules",
            f"must hold {' and '.join(modules)} with tp {tp}",
            why=f"of {found[0]} a rank holds rows from several places, and an adapter of one matrix needs rows that "
            "follow each other",
            hint="or use tp 1",
        )


def layout_of_first_rank(family: Family, architecture: Architecture, *, tp: int = 1) -> MemoryLayout:
    """Returns the layout of the checkpoint's tensors on the first rank of a tensor-parallel group, which holds its part
    of every layer. Alone it holds the whole model."""
    (shard,) = shards.shards_of_rank(architecture, 0, tp=tp)
    shapes = family.parameters(architecture, shard)
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return record(
        partial(family.load, architecture=architecture, shard=shard), parameters, family.tensors(architecture)
    )
