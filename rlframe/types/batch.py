"""Batches: rollouts packed end to end, without padding."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Packed = TypeVar("Packed", bound="Sequences")


class Axis(StrEnum):
    """What the first axis of a batch's field counts. Selecting, packing and handing over follow from it."""

    TOKEN = "token"
    """T packed tokens."""
    SEQUENCE = "sequence"
    """R sequences."""


by_token = partial(field, metadata={"axis": Axis.TOKEN})
"""Declares a [T, ...] field."""
by_sequence = partial(field, metadata={"axis": Axis.SEQUENCE})
"""Declares an [R, ...] field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprobs:
    """What a teacher finds likeliest in the place of each of T packed tokens, given those before it."""

    ids: Int[Tensor, "T k"]
    """[T, k] int32."""
    logprobs: Float[Tensor, "T k+1"]
    """[T, k + 1] nats of those, and last of all other tokens together; 0.0 at first tokens."""


@dataclass(kw_only=True, slots=True)
class Sequences:
    """R token sequences packed to T tokens: all a model needs for a forward pass.

    Example: two sequences, of 3 and 2 tokens:
        token_ids [7, 8, 5, 9, 4], lengths [3, 2], loss_mask [F, F, T, F, T]
    """

    token_ids: Int[Tensor, " T"] = by_token()
    """[T] int64, sequence after sequence."""
    lengths: Int[Tensor, " R"] = by_sequence()
    """[R] tokens of each sequence; their sum is T."""
    loss_mask: Bool[Tensor, " T"] = by_token()
    """[T] True where the token counts in the loss. The first token of a sequence has no prediction, so False there."""
    teacher_top_ids: Int[Tensor, "T k"] | None = by_token(default=None)
    """[T, k] int32, the tokens that the teacher finds likeliest in each token's place; present only if the algorithm
    compares itself with the teacher's top k."""
    teacher_top_logprobs: Float[Tensor, "T k+1"] | None = by_token(default=None)
    """[T, k + 1] nats of those, and last of all other tokens together; 0.0 at first tokens. Comes with their ids."""
    routes: Shaped[Tensor, "T layers k"] | None = by_token(default=None)
    """[T, layers, k] the experts that each token went to in the engine, in each layer that has experts: layers * k
    bytes a token (uint8; int16 above 256 experts). 0 at the last token of a sequence, which went nowhere there. Present
    only if routers are to choose the same."""

    @property
    def num_sequences(self) -> int:
        """R."""
        return int(self.lengths.numel())

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.numel())

    def sequence_index(self) -> Int[Tensor, " T"]:
        """Returns [T] the sequence (0..R-1) each token belongs to."""
        return torch.repeat_interleave(self.lengths)

    def units(self) -> Int[Tensor, " R"]:
        """Returns [R] index of the unit each sequence belongs to: what must share a micro-batch. Each is one of its
        own."""
        return torch.arange(self.num_sequences)

    def select(self: Packed, indices: list[int]) -> Packed:
        """Returns the sequences `indices`, in that order, packed anew. Every field follows by its axis."""
        rows = torch.tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        shifts = (torch.cumsum(self.lengths, 0) - self.lengths)[rows] - (torch.cumsum(lengths, 0) - lengths)
        picks = {
            Axis.SEQUENCE: rows,
            Axis.TOKEN: torch.arange(int(lengths.sum())) + torch.repeat_interleave(shifts, lengths),
        }
        return self.each(lambda value, axis: value[picks[axis]])

    def each(self: Packed, change: Callable[[Tensor, Axis], Tensor]) -> Packed:
        """Returns the batch with `change` applied to the tensor of each field that has one."""
        changed = {
            known.name: change(value, known.metadata["axis"])
            for known in fields(self)
            if isinstance(value := getattr(self, known.name), Tensor)
        }
        return replace(self, **changed)


@dataclass(kw_only=True, slots=True)
class Batch(Sequences):
    """R rollouts packed to T tokens, before advantages are known."""

    rollout_logprobs: Float[Tensor, " T"] = by_token()
    """[T] nats, from the engine that sampled; 0.0 where loss_mask is False."""
    group: Int[Tensor, " R"] = by_sequence()
    """[R] index of the prompt (0..P-1) each rollout attempts."""
    rewards: Float[Tensor, " R"] = by_sequence()
    """[R] reward of each rollout; NaN where no reward had a say."""
    versions: Int[Tensor, " T"] = by_token()
    """[T] int32 policy version that sampled each token; GIVEN where none did."""
    old_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats, policy before the update; None where the update takes them from its own first forward."""
    reference_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats, frozen reference; present only if the algorithm asks for it."""
    teacher_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats, the teacher's; present only if the algorithm asks for it."""
    values: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] critic's value of the state before each token; present only if the algorithm asks for it."""
    returns: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] what the critic is to say of the state before each token; 0.0 where loss_mask is False. Comes with values."""
    truncated: Bool[Tensor, " R"] | None = by_sequence(default=None)
    """[R] True where the rollout was cut off and did not end by itself; None where that is not known."""
    reward_parts: Float[Tensor, "R K"] | None = by_sequence(default=None)
    """[R, K] what each of K reward functions said, unweighted; NaN where it had no say. None where that is not known.
    """
    part_weights: Float[Tensor, "R K"] | None = by_sequence(default=None)
    """[R, K] what each of them counts in the reward, the same in every row. Comes with reward_parts."""

    def with_advantages(self, advantages: Float[Tensor, " T"]) -> "TrainBatch":
        """Returns the same batch with advantages: the only kind that reaches an online loss."""
        return TrainBatch(advantages=advantages, **{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(kw_only=True, slots=True)
class TrainBatch(Batch):
    """A Batch with advantages."""

    advantages: Float[Tensor, " T"] = by_token()
    """[T] advantage of each sampled token; 0.0 where loss_mask is False."""
    uncertain: Bool[Tensor, " T"] | None = by_token(default=None)
    """[T] True at tokens in whose place the policy was uncertain enough for them to count; None where all do."""
    chosen: Bool[Tensor, " T"] | None = by_token(default=None)
    """[T] True at tokens that the algorithm treats apart, chosen over the whole batch; None where it has none."""
