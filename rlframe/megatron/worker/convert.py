"""Converts between Hugging Face checkpoints and Megatron's distributed ones, with a few tensors in memory at a time.

Megatron's modules are built on the meta device, in one piece and without values. They define the content of a
distributed checkpoint, and the family's recording maps it to parts of Hugging Face tensors. Values exist only in
transit: one parameter on the way to Megatron, about EXPORT_CHUNK_BYTES on the way back. The result loads in any
parallel layout, because the format is independent of layouts.

It runs in one process on the CPU. Import it after `platform.install`.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from rlframe.megatron.checkpoint import files, reading
from rlframe.megatron.checkpoint import state as checkpoint
from rlframe.megatron.checkpoint.pieces import pieces_by_parameter
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.chunks import chunks
from rlframe.megatron.model import model
from rlframe.megatron.model.transformer import transformer_config
from rlframe.megatron.packed.inputs import PackedInputs
from rlframe.megatron.worker import parallel
from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.families.base import Architecture, Family
from rlframe.types.batch import Sequences
from rlframe.weight_sync.layout.boxes import matrix_shape
from rlframe.weight_sync.layout.memory import MemoryLayout, export_tensor, record

CPU = torch.device("cpu")
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A model without values."""

    weights: dict[str, Any]
    """Contents of a distributed checkpoint of the model: Megatron's sharded tensors, on the meta device."""
    parameters: dict[str, Tensor]
    """Parameters by canonical name, on the meta device."""
    layout: MemoryLayout
    """Layout of the Hugging Face tensors in the parameters."""


@contextmanager
def one_rank() -> Iterator[None]:
    """Creates Megatron's process groups for this process alone, inside the block."""
    with tempfile.TemporaryDirectory() as folder:
        parallel.initialize(
            Parallel(), rank=0, device=CPU, init_method=f"file://{folder}/rendezvous", seed=0, timeout_s=TIMEOUT_S
        )
        try:
            yield
        finally:
            parallel.shutdown()


def skeleton(family: Family, architecture: Architecture, dtype: Dtype) -> Skeleton:
    """Returns the model without values. Needs `one_rank`."""
    module = _module(architecture, dtype, device=torch.device("meta"))
    parameters = model.named_weights([module])
    shard = model.shard_of(architecture, module.config, chunk=0)
    load = partial(family.load, architecture=architecture, shard=shard)
    return Skeleton(
        weights=checkpoint.sharded_weights(module),
        parameters=parameters,
        layout=record(load, parameters, family.tensors(architecture)),
    )


def to_megatron(source: CheckpointReader, bones: Skeleton, folder: Path) -> None:
    """Writes the weights in `source` as a distributed checkpoint into the existing `folder`, verified by checksums."""
    staged = checkpoint.plan({"model": bones.weights}, folder)
    staged.fetch = _Fetch(source, bones)
    checkpoint.complete(
        staged,
        [
            files.write(
                staged,
            )
        ],
    )


def from_megatron(folder: Path, bones: Skeleton, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields every Hugging Face tensor of the distributed checkpoint in `folder`, in the order of the model.

    Raises:
        CheckpointError: the checkpoint in `folder` belongs to another model.
    """
    pieces = {
        model_name: pieces_by_parameter(bones.weights)[parameter]
        for model_name, parameter in _weights_by_name(bones).items()
    }
    requested = {piece.key for of_parameter in pieces.values() for piece in of_parameter}
    reader = reading.Reader(folder)
    reading.require_all(requested, reader, checkpoint.WEIGHTS)
    reading.require_vocabulary(reader, bones.layout.tensors["model.embed_tokens.weight"][0])
    for names in chunks(bones.layout.tensors, dtype):
        needed = {box.parameter for name in names for box in bones.layout.boxes[name]}
        real = {
            name: torch.empty(bones.parameters[name].shape, dtype=model.export_dtype(name, dtype))
            for name in sorted(needed)
        }
        wanted = {
            f"{name} {index}": _alone(piece, _same_part(real[name], piece.data))
            for name in real
            for index, piece in enumerate(pieces[name])
        }
        checkpoint.read({"model": wanted}, folder, whole=False)
        for name in names:
            kept = real[bones.layout.boxes[name][0].parameter].dtype
            whole = torch.empty(bones.layout.tensors[name], dtype=kept)
            export_tensor(bones.layout, real, name, whole)
            yield name, whole


@torch.no_grad()
def logprobs(architecture: Architecture, folder: Path, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [T, V] nats of the token after each of `token_ids` [T], computed with the distributed checkpoint in
    `folder`, in float32 from weights rounded to `dtype`. Needs `one_rank`. The whole model is in memory."""
    module = _module(architecture, Dtype.FLOAT32, device=CPU)
    state = checkpoint.read({"model": checkpoint.sharded_weights(module)}, folder)
    module.load_state_dict(state["model"])
    # The other model has rounded weights, so those of a float32 checkpoint are rounded too.
    for name, weight in model.named_weights([module]).items():
        weight.copy_(weight.to(model.export_dtype(name, dtype)))
    module.eval()
    count = len(token_ids)
    batch = Sequences(token_ids=token_ids, lengths=torch.tensor([count]), loss_mask=torch.ones(count, dtype=torch.bool))
    inputs = PackedInputs.of(batch, 1)
    logits = module(
        input_ids=inputs.token_ids, position_ids=None, attention_mask=None, packed_seq_params=inputs.packing
    )
    return torch.log_softmax(logits[0, :, : architecture.vocab_size], -1)


def _module(architecture: Architecture, dtype: Dtype, *, device: torch.device) -> Any:
    """Returns Megatron's module of the whole model, with its parameters on `device`."""
    config = transformer_config(architecture, TrainConfig(dtype=dtype), Parallel(), CPU)
    config.perform_initialization = False
    with device:
        return model.module(architecture, config, CPU, chunk=0)


def _weights_by_name(bones: Skeleton) -> dict[str, Tensor]:
    """Returns the tensors of `bones.weights` by the canonical name of the parameter whose memory they share."""
    of_storage = {each.untyped_storage()._cdata: name for name, each in bones.parameters.items()}
    found = {}
    for tensor in pieces_by_parameter(bones.weights):
        if name := of_storage.get(tensor.untyped_storage()._cdata):
            found[name] = tensor
    return found


def _same_part(whole: Tensor, part: Tensor | None) -> Tensor:
    """Returns the part of `whole` at the position of `part` in a tensor of the same kind."""
    assert part is not None
    return whole.as_strided(part.shape, part.stride(), part.storage_offset())


def _alone(piece: ShardedTensor, values: Tensor) -> ShardedTensor:
    """Returns `piece` with `values`, to be read without the rest of its tensor, which may stack all layers. Megatron
    reads a regular grid of pieces only as a whole."""
    shape = (1,) * piece.prepend_axis_num + tuple(values.shape)
    return replace(
        piece,
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        prepend_axis_num=0,
        axis_fragmentations=None,
    )


class _Fetch:
    """Supplies values for parts of meta parameters, with one parameter in memory at a time."""

    def __init__(self, source: CheckpointReader, bones: Skeleton):
        self._source, self._bones = source, bones
        self._name_of = {each.untyped_storage()._cdata: name for name, each in bones.parameters.items()}
        self._sources: dict[str, list[str]] = defaultdict(list)
        for name, boxes in bones.layout.boxes.items():
            for parameter in dict.fromkeys(box.parameter for box in boxes):
                self._sources[parameter].append(name)
        self._current: tuple[str, Tensor] | None = None

    def __call__(self, part: Tensor) -> Tensor:
        """Returns the values of `part`."""
        name = self._name_of[part.untyped_storage()._cdata]
        if self._current is None or self._current[0] != name:
            self._current = None
            self._current = (name, self._values(name))
        return _same_part(self._current[1], part)

    def _values(self, name: str) -> Tensor:
        parameter = self._bones.parameters[name]
        # Elements that no tensor fills are padding.
        real = torch.zeros(parameter.shape, dtype=parameter.dtype)
        for source in self._sources[name]:
            value = self._source.tensor(source)
            matrix = value.view(matrix_shape(tuple(value.shape)))
            for box in self._bones.layout.boxes[source]:
                if box.parameter == name:
                    box.view({name: real}).copy_(matrix[box.row : box.row + box.rows, box.col : box.col + box.cols])
        return real
