"""Prompts that several sequences of a micro-batch share: their tokens are rows of the pack once.

The pack is then one row of tokens, of which only attention knows the sequences. Each token has the angles of its own
position, and each sequence attends to the keys of its whole prompt, of which the shared ones are gathered from the rows
of another sequence. Its queries are fewer than its keys, and stand for the last ones. All other operations of a layer
are about single tokens. The mathematics is that of sequences computed apart, and so are the gradients: those of a
shared key are the sum over the sequences that read it.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlframe.megatron.packed import split_attention
from rlframe.megatron.packed.bounds import bounds_of
from rlframe.megatron.packed.fused_kernels import FusedKernels
from rlframe.megatron.packed.split_bounds import Split
from rlframe.megatron.transfer import upload


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The sequences of a pack with shared prompts, for its attention."""

    positions: Tensor
    """[T_padded] position of each row in its sequence. 0 for padding."""
    keys: Tensor
    """[K] row of each token of each sequence: shared rows are there once for each sequence. Then the padding's."""
    bounds: PackedSeqParams
    """Bounds of the sequences among the rows (queries), and in `keys`."""
    readers: Tensor
    """[K] int32 the places in `keys` of row 0, then those of row 1, and so on."""
    starts: Tensor
    """[T_padded + 1] int32 bounds of the rows in `readers`."""
    split: Split | None
    """Two calls which need no key twice, for attention that can make them. None where one call costs less."""

    @classmethod
    def of(cls, rows: Tensor, positions: Tensor, lengths: Tensor, bounds: Tensor) -> "SharedPrompts":
        """Returns what attention needs to know about a pack.

        Args:
            rows: [T] row of each token.
            positions: [T] position of each token in its sequence.
            lengths: [R] number of tokens of each sequence, shared ones included.
            bounds: [R + 1, or R + 2 with padding] bounds of the sequences among the rows.
        """
        num_rows, filling = int(bounds[-1]), int(bounds[-1] - bounds[len(lengths)])
        padding = torch.arange(num_rows - filling, num_rows)
        key_lengths = torch.cat([lengths, lengths.new_tensor([filling])]) if filling else lengths
        keys = torch.cat([rows, padding])
        return cls(
            positions=positions.new_zeros(num_rows).index_put((rows,), positions),
            keys=keys,
            readers=torch.argsort(keys, stable=True).to(torch.int32),
            starts=bounds_of(torch.bincount(keys, minlength=num_rows)),
            bounds=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds_of(key_lengths),
                max_seqlen_q=int(bounds.diff().max()),
                max_seqlen_kv=int(key_lengths.max()),
            ),
            split=Split.of(bounds, lengths - bounds.diff()[: len(lengths)], len(keys)),
        )

    def on_one_row(self) -> PackedSeqParams:
        """Returns the bounds of a pack that is one sequence, which carry this object to the attention."""
        end = self.bounds.cu_seqlens_q[-1:]
        whole, length = torch.cat([torch.zeros_like(end), end]), len(self.positions)
        packing = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=whole, cu_seqlens_kv=whole, max_seqlen_q=length, max_seqlen_kv=length
        )
        packing.shared_prompts = self
        return packing


def packing_on(packing: PackedSeqParams, device: torch.device) -> PackedSeqParams:
    """Returns the same bounds on `device`, with those of shared prompts. Bounds that are one tensor remain one, by
    which Transformer Engine knows that there is no padding between sequences."""
    bounds = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    held = {name: value for name in bounds if (value := getattr(packing, name)) is not None}
    there = {id(value): upload(value, device) for value in held.values()}
    moved = replace(packing, **{name: there[id(value)] for name, value in held.items()})
    shared = getattr(packing, "shared_prompts", None)
    if shared is not None:
        moved.shared_prompts = SharedPrompts(
            positions=upload(shared.positions, device),
            keys=upload(shared.keys, device),
            readers=upload(shared.readers, device),
            starts=upload(shared.starts, device),
            bounds=packing_on(shared.bounds, device),
            split=None if shared.split is None else shared.split.on(device),
        )
    return moved


class Mask(Enum):
    """A mask that Transformer Engine knows by this name, and Megatron-Core's `AttnMaskType` lacks."""

    padding_causal_bottom_right = 1
    """The last query of a sequence sees its last key."""


def prepare(model: GPTModel) -> None:
    """Makes the model compute packs with shared prompts too. Others are computed as before, bit for bit."""
    model.decoder.register_forward_pre_hook(_turn_by_position, with_kwargs=True)
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.register_forward_pre_hook(_take_keys, with_kwargs=True)
        split_attention.install(core, FusedKernels.of(core))


def _turn_by_position(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Gives each row the rotary angles of its position: [..., T_padded, 1, 1, D]."""
    shared = getattr(options["packed_seq_params"], "shared_prompts", None)
    angles = options["rotary_pos_emb"]
    if shared is None or angles is None:
        return None
    return arguments, options | {"rotary_pos_emb": angles.index_select(-4, shared.positions)}


def _take_keys(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Gives core attention the keys and values of each sequence, unless it reads those of a prompt by themselves."""
    shared = getattr(options["packed_seq_params"], "shared_prompts", None)
    if shared is None or split_attention.splits(module, arguments[0], shared.split, options):
        return None
    query, key, value, *rest = arguments
    key, value = (TakeRows.apply(each, shared) for each in (key, value))
    return (query, key, value, *rest), options | {
        "packed_seq_params": shared.bounds,
        "attn_mask_type": Mask.padding_causal_bottom_right,
    }


class TakeRows(torch.autograd.Function):
    """Rows of a tensor, some of them several times. Gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shared: SharedPrompts) -> Tensor:
        """Returns [K, ...] the rows `shared.keys` of values [T_padded, ...]."""
        ctx.shared = shared
        return values.index_select(0, shared.keys)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of values."""
        shared: SharedPrompts = ctx.shared
        if grad.is_cuda:
            # Without Triton this module can still be imported.
            from rlframe.megatron.packed.row_kernels import row_sums  # noqa: PLC0415

            return row_sums(grad, shared.readers, shared.starts), None
        total = grad.new_zeros(len(shared.positions), *grad.shape[1:], dtype=torch.float32)
        return total.index_add_(0, shared.keys, grad.float()).to(grad.dtype), None
