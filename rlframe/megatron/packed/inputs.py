"""A micro-batch as input of the model."""

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlframe.megatron.packed.bounds import bounds_of
from rlframe.megatron.packed.context_parallel import gather_rows, rows_of_ranks, whole_on_ranks
from rlframe.megatron.packed.shared_prompts import SharedPrompts, packing_on
from rlframe.megatron.transfer import upload
from rlframe.types.batch import Sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInputs:
    """A micro-batch as input of the model, padded so that context and sequence parallelism can split it evenly.

    With context parallelism each sequence is padded at its end to a multiple of 2 * cp. Causal attention never reads
    the padding, so the padded length may stand for the sequence's own. If sequences are whole on ranks, the ranks are
    padded to the same number of tokens instead.

    Tokens that sequences share (`Sequences.shared`) have one row for all of them; see `shared_prompts`.
    """

    token_ids: Tensor
    """[1, T_padded / cp] tokens of this rank."""
    packing: PackedSeqParams
    """Bounds of each padded sequence in the whole pack, or of those that are whole on this rank. Remaining padding is
    one more sequence."""
    rows: Tensor
    """[T] position of each token of the micro-batch among those of all ranks, which follow one another."""
    cp_size: int = 1
    cp_rank: int = 0
    picked: Tensor | None = None
    """[N] tokens of this rank whose logits are computed, by position. None for all."""

    @classmethod
    def of(
        cls, batch: Sequences, multiple: int, *, cp_size: int = 1, cp_rank: int = 0, dynamic: bool = False
    ) -> "PackedInputs":
        """Returns `batch`, which is on the CPU, padded so that each rank has a multiple of `multiple` tokens, at least
        one.

        Args:
            dynamic: whether sequences are whole on ranks where that is even enough.
        """
        if batch.shared is not None:
            assert cp_size == 1, "refused by config.check"
            return cls._shared(batch, batch.shared, multiple)
        if dynamic and (parts := whole_on_ranks(batch.lengths.tolist(), cp_size)):
            return cls._whole(batch, parts, multiple, cp_rank)
        lengths = padded_lengths(batch, multiple, cp_size)
        bounds = bounds_of(lengths)
        shift = bounds[: batch.num_sequences] - torch.cumsum(batch.lengths, 0) + batch.lengths
        rows = torch.arange(batch.num_tokens) + torch.repeat_interleave(shift, batch.lengths)
        if cp_size > 1:
            rows = torch.argsort(rows_of_ranks(bounds, cp_size))[rows]
        return cls._cut(batch, rows, packing_of(bounds, padded=cp_size > 1), int(bounds[-1]), cp_size, cp_rank)

    @classmethod
    def _whole(cls, batch: Sequences, parts: list[list[int]], multiple: int, cp_rank: int) -> "PackedInputs":
        lengths, cp_size, size = batch.lengths.tolist(), len(parts), rows_of_whole(batch, parts, multiple)
        firsts = [0] * len(lengths)
        for rank, part in enumerate(parts):
            place = rank * size
            for index in part:
                firsts[index] = place
                place += lengths[index]
        starts = torch.cumsum(batch.lengths, 0) - batch.lengths
        shift = torch.repeat_interleave(batch.lengths.new_tensor(firsts) - starts, batch.lengths)
        rows = torch.arange(batch.num_tokens) + shift
        own = [lengths[index] for index in parts[cp_rank]]
        own += [size - sum(own)] if size > sum(own) else []
        packing = packing_of(bounds_of(batch.lengths.new_tensor(own)), padded=False)
        packing.local_cp_size = 1
        return cls._cut(batch, rows, packing, size * cp_size, cp_size, cp_rank)

    @classmethod
    def _cut(
        cls, batch: Sequences, rows: Tensor, packing: PackedSeqParams, num_rows: int, cp_size: int, cp_rank: int
    ) -> "PackedInputs":
        tokens = batch.token_ids.new_zeros(num_rows).index_put((rows,), batch.token_ids).chunk(cp_size)[cp_rank]
        return cls(token_ids=tokens[None], packing=packing, rows=rows, cp_size=cp_size, cp_rank=cp_rank)

    @classmethod
    def _shared(cls, batch: Sequences, shared: Tensor, multiple: int) -> "PackedInputs":
        lengths = padded_lengths(batch, multiple, 1)
        bounds = bounds_of(lengths)
        first_rows, starts = bounds[: batch.num_sequences].long(), torch.cumsum(batch.lengths, 0) - batch.lengths
        numbers = torch.arange(batch.num_sequences)
        heads = torch.where(shared == 0, numbers, 0).cummax(0).values if len(numbers) else numbers

        def by_token(values: Tensor) -> Tensor:
            return torch.repeat_interleave(values, batch.lengths)

        positions = torch.arange(batch.num_tokens) - by_token(starts)
        rows = positions + by_token(first_rows - shared)
        rows = torch.where(positions < by_token(shared), positions + by_token(first_rows[heads]), rows)
        return cls._cut(
            batch, rows, SharedPrompts.of(rows, positions, batch.lengths, bounds).on_one_row(), int(bounds[-1]), 1, 0
        )

    def picking(self, mask: Tensor, *, multiple: int = 1) -> "PackedInputs":
        """Returns the same, which is on the CPU, with the logits of tokens alone whose successor is in a mask [T]: of
        all if it is every token's, and of further ones up to a multiple of `multiple`, at least that many."""
        # A row that several sequences share is picked for any of them.
        whole = torch.zeros(self.cp_size * self.token_ids.shape[1], dtype=torch.int64)
        whole.index_put_((self.rows[:-1],), mask[1:].long(), accumulate=True)
        marks = whole.chunk(self.cp_size)[self.cp_rank] > 0
        count = max(1, -(-int(marks.sum()) // multiple)) * multiple
        if count >= len(marks):
            return self
        others = (~marks).nonzero().squeeze(1)
        marks[others[: count - int(marks.sum())]] = True
        return replace(self, picked=marks.nonzero().squeeze(1))

    def to(self, device: torch.device) -> "PackedInputs":
        """Returns the same on `device`."""
        return replace(
            self,
            token_ids=upload(self.token_ids, device),
            rows=upload(self.rows, device),
            packing=packing_on(self.packing, device),
            picked=None if self.picked is None else upload(self.picked, device),
        )

    def own(self, values: Tensor) -> Tensor:
        """Returns [T_padded / cp, ...] the value of each of this rank's tokens. 0 for padding.

        Args:
            values: [T, ...] value of each token of the micro-batch.
        """
        return self._own(self.rows, values)

    def following(self, values: Tensor) -> Tensor:
        """Returns [T_padded / cp, ...] the value of the token after each of this rank's tokens, in any sequence. 0 if
        there is none.

        Args:
            values: [T, ...] value of each token of the micro-batch.
        """
        return self._own(self.rows[:-1], values[1:])

    def targets(self, values: Tensor) -> Tensor:
        """Returns [N, ...] `following` of the tokens whose logits are computed."""
        found = self.following(values)
        return found if self.picked is None else found[self.picked]

    def of_all(self, values: Tensor) -> Tensor:
        """Returns [T_padded / cp, ...] values [N, ...] of the tokens whose logits are computed. 0 for others."""
        if self.picked is None:
            return values
        return values.new_zeros(self.token_ids.shape[1], *values.shape[1:]).index_put((self.picked,), values)

    def _own(self, rows: Tensor, values: Tensor) -> Tensor:
        whole = values.new_zeros(self.cp_size * self.token_ids.shape[1], *values.shape[1:])
        return whole.index_put((rows,), values).chunk(self.cp_size)[self.cp_rank]

    def gathered(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns [T, ...] the value of each token of the micro-batch, on every rank.

        Args:
            values: [T_padded / cp, ...] value of each of this rank's tokens.
            group: the context-parallel ranks, which must compute the same from it.
        """
        return gather_rows(values, group)[self.rows]

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
    ends = torch.repeat_interleave(torch.cumsum(lengths, 0), lengths, output_size=len(values))
    there = torch.arange(len(values), device=values.device) + steps
    inside = there < ends
    return torch.where(inside, values[torch.where(inside, there, 0)], values.new_zeros(()))


def packing_of(bounds: Tensor, *, padded: bool) -> PackedSeqParams:
    """Returns how sequences are packed.

    Args:
        padded: whether ranks share each sequence, which Transformer Engine must be told.
    """
    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds if padded else None,
        cu_seqlens_kv_padded=bounds if padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def rows_of_whole(batch: Sequences, parts: list[list[int]], multiple: int) -> int:
    """Returns the tokens of each rank, if the sequences `parts` are whole on it."""
    lengths = batch.lengths.tolist()
    return -(-max(sum(lengths[index] for index in part) for part in parts) // multiple) * multiple


def num_computed(batch: Sequences, multiple: int, cp_size: int, *, dynamic: bool) -> int:
    """Returns the tokens that are computed on all context-parallel ranks together, as `PackedInputs.of` divides
    them."""
    if dynamic and (parts := whole_on_ranks(batch.lengths.tolist(), cp_size)):
        return rows_of_whole(batch, parts, multiple) * cp_size
    return int(padded_lengths(batch, multiple, cp_size).sum())


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
