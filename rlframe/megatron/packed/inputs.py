"""A micro-batch as input of the model."""

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlframe.megatron.packed.context_parallel import rows_of_rank
from rlframe.megatron.packed.shared_prompts import SharedPrompts
from rlframe.types.batch import Sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInputs:
    """A micro-batch as input of the model, padded so that context and sequence parallelism can split it evenly.

    With context parallelism each sequence is padded at its end to a multiple of 2 * cp. Causal attention never reads
    the padding, so the padded length may stand for the sequence's own.

    Tokens that sequences share (`Sequences.shared`) have one row for all of them; see `shared_prompts`.
    """

    token_ids: Tensor
    """[1, T_padded / cp] tokens of this rank."""
    packing: PackedSeqParams
    """Bounds of each padded sequence in the whole pack. Remaining padding is one more sequence."""
    rows: Tensor
    """[T] position of each token of the micro-batch in the whole pack of T_padded."""
    own_rows: Tensor
    """[T_padded / cp] position of this rank's tokens in the whole pack."""

    @classmethod
    def of(cls, batch: Sequences, multiple: int, *, cp_size: int = 1, cp_rank: int = 0) -> "PackedInputs":
        """Returns `batch` padded so that each rank has a multiple of `multiple` tokens, at least one."""
        device = batch.token_ids.device
        if batch.shared is not None:
            assert cp_size == 1, "refused by config.check"
            return cls._shared(batch, batch.shared, multiple)
        lengths = padded_lengths(batch, multiple, cp_size)
        bounds = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)
        longest = int(lengths.max())
        shift = bounds[: batch.num_sequences] - torch.cumsum(batch.lengths, 0) + batch.lengths
        rows = torch.arange(batch.num_tokens, device=device) + torch.repeat_interleave(shift, batch.lengths)
        own_rows = rows_of_rank(bounds, cp_size, cp_rank)
        return cls(
            token_ids=batch.token_ids.new_zeros(int(lengths.sum())).index_put((rows,), batch.token_ids)[None, own_rows],
            packing=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                # Transformer Engine reads these two only if ranks share a sequence.
                cu_seqlens_q_padded=bounds if cp_size > 1 else None,
                cu_seqlens_kv_padded=bounds if cp_size > 1 else None,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            rows=rows,
            own_rows=own_rows,
        )

    @classmethod
    def _shared(cls, batch: Sequences, shared: Tensor, multiple: int) -> "PackedInputs":
        lengths = padded_lengths(batch, multiple, 1)
        bounds = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)
        first_rows, starts = bounds[: batch.num_sequences].long(), torch.cumsum(batch.lengths, 0) - batch.lengths
        numbers = torch.arange(batch.num_sequences, device=shared.device)
        heads = torch.where(shared == 0, numbers, 0).cummax(0).values if len(numbers) else numbers

        def by_token(values: Tensor) -> Tensor:
            return torch.repeat_interleave(values, batch.lengths)

        positions = torch.arange(batch.num_tokens, device=shared.device) - by_token(starts)
        rows = positions + by_token(first_rows - shared)
        rows = torch.where(positions < by_token(shared), positions + by_token(first_rows[heads]), rows)
        num_rows = int(bounds[-1])
        return cls(
            token_ids=batch.token_ids.new_zeros(num_rows).index_put((rows,), batch.token_ids)[None],
            packing=SharedPrompts.of(rows, positions, batch.lengths, bounds).on_one_row(),
            rows=rows,
            own_rows=torch.arange(num_rows, device=shared.device),
        )

    def own(self, values: Tensor) -> Tensor:
        """Returns [T_padded / cp, ...] the value of each of this rank's tokens. 0 for padding.

        Args:
            values: [T, ...] value of each token of the micro-batch.
        """
        whole = values.new_zeros(int(self.packing.cu_seqlens_q[-1]), *values.shape[1:])
        return whole.index_put((self.rows,), values)[self.own_rows]

    def following(self, values: Tensor) -> Tensor:
        """Returns [T_padded / cp, ...] the value of the token after each of this rank's tokens, in any sequence. 0 if
        there is none.

        Args:
            values: [T, ...] value of each token of the micro-batch.
        """
        whole = values.new_zeros(int(self.packing.cu_seqlens_q[-1]), *values.shape[1:])
        return whole.index_put((self.rows[:-1],), values[1:])[self.own_rows]

    def ahead(self, values: Tensor, lengths: Tensor, steps: int) -> Tensor:
        """Returns [T_padded / cp] the value of the token `steps` after each of this rank's tokens, in the same
        sequence. 0 if there is none.

        Args:
            values: [T] value of each token of the micro-batch.
            lengths: [R] number of tokens of each sequence.
        """
        return self.own(ahead(values, lengths, steps))


def ahead(values: Tensor, lengths: Tensor, steps: int) -> Tensor:
    """Returns [T] the value of the token `steps` after each token, in the same sequence. 0 if there is none.

    Args:
        values: [T] value of each token.
        lengths: [R] number of tokens of each sequence.
    """
    ends = torch.repeat_interleave(torch.cumsum(lengths, 0), lengths)
    there = torch.arange(len(values), device=values.device) + steps
    inside = there < ends
    return torch.where(inside, values[torch.where(inside, there, 0)], values.new_zeros(()))


def padded_lengths(batch: Sequences, multiple: int, cp_size: int) -> Tensor:
    """Returns the tokens of each sequence of `PackedInputs` that are computed, and of one more sequence that fills the
    pack up, if any."""
    piece = 2 * cp_size if cp_size > 1 else 1
    lengths = batch.lengths if batch.shared is None else batch.lengths - batch.shared
    lengths = -(-lengths // piece) * piece
    filling = math.lcm(piece, multiple * cp_size)
    if num_tokens := int(lengths.sum()):
        filling = -num_tokens % filling
    return torch.cat([lengths, lengths.new_tensor([filling])]) if filling else lengths
