"""Batches: rollouts packed end to end, without padding."""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

GIVEN = -1
"""Version of a response that no policy made: it comes from the data."""
Packed = TypeVar("Packed", bound="Sequences")


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

    token_ids: Int[Tensor, " T"]
    """[T] int64, sequence after sequence."""
    lengths: Int[Tensor, " R"]
    """[R] tokens of each sequence; their sum is T."""
    loss_mask: Bool[Tensor, " T"]
    """[T] True where the token counts in the loss. The first token of a sequence has no prediction, so False there."""
    teacher_top_ids: Int[Tensor, "T k"] | None = None
    """[T, k] int32, the tokens that the teacher finds likeliest in each token's place; present only if the algorithm
    compares itself with the teacher's top k."""
    teacher_top_logprobs: Float[Tensor, "T k+1"] | None = None
    """[T, k + 1] nats of those, and last of all other tokens together; 0.0 at first tokens. Comes with their ids."""
    routes: Shaped[Tensor, "T layers k"] | None = None
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
        """[T] the sequence (0..R-1) each token belongs to."""
        return torch.repeat_interleave(self.lengths)

    def units(self) -> Int[Tensor, " R"]:
        """[R] index of the unit each sequence belongs to: what must share a micro-batch. Each is one of its own."""
        return torch.arange(self.num_sequences)

    def select(self: Packed, indices: list[int]) -> Packed:
        """The sequences `indices`, in that order, packed anew. Every [T] and [R] field follows."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        tokens = [torch.arange(int(starts[i]), int(starts[i] + self.lengths[i])) for i in indices]
        rows = torch.tensor(indices, dtype=torch.int64)
        token_rows = torch.cat(tokens) if tokens else rows
        picked = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor):
                continue
            picked[field.name] = value[rows if field.name in self.per_sequence_fields() else token_rows]
        return replace(self, **picked)

    @classmethod
    def per_sequence_fields(cls) -> frozenset[str]:
        """Names of the [R] fields; all others are [T]."""
        return frozenset({"lengths", "group", "rewards", "versions", "truncated", "reward_parts", "part_weights"})


@dataclass(kw_only=True, slots=True)
class Batch(Sequences):
    """R rollouts packed to T tokens, before advantages are known."""

    rollout_logprobs: Float[Tensor, " T"]
    """[T] nats, from the engine that sampled; 0.0 where loss_mask is False."""
    group: Int[Tensor, " R"]
    """[R] index of the prompt (0..P-1) each rollout attempts."""
    rewards: Float[Tensor, " R"]
    """[R] reward of each rollout; NaN where no reward had a say."""
    versions: Int[Tensor, " R"]
    """[R] oldest policy version that made part of the rollout; GIVEN where the response comes from the data."""
    old_logprobs: Float[Tensor, " T"] | None = None
    """[T] nats, policy before the update; None where the update takes them from its own first forward."""
    reference_logprobs: Float[Tensor, " T"] | None = None
    """[T] nats, frozen reference; present only if the algorithm asks for it."""
    teacher_logprobs: Float[Tensor, " T"] | None = None
    """[T] nats, the teacher's; present only if the algorithm asks for it."""
    values: Float[Tensor, " T"] | None = None
    """[T] critic's value of the state before each token; present only if the algorithm asks for it."""
    returns: Float[Tensor, " T"] | None = None
    """[T] what the critic is to say of the state before each token; 0.0 where loss_mask is False. Comes with values."""
    truncated: Bool[Tensor, " R"] | None = None
    """[R] True where the rollout was cut off and did not end by itself; None where that is not known."""
    reward_parts: Float[Tensor, "R K"] | None = None
    """[R, K] what each of K reward functions said, unweighted; NaN where it had no say. None where that is not known.
    """
    part_weights: Float[Tensor, "R K"] | None = None
    """[R, K] what each of them counts in the reward, the same in every row. Comes with reward_parts."""

    def with_advantages(self, advantages: Float[Tensor, " T"]) -> "TrainBatch":
        """The same batch with advantages: the only kind that reaches an online loss."""
        return TrainBatch(advantages=advantages, **{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(kw_only=True, slots=True)
class TrainBatch(Batch):
    """A Batch with advantages."""

    advantages: Float[Tensor, " T"]
    """[T] advantage of each sampled token; 0.0 where loss_mask is False."""
    uncertain: Bool[Tensor, " T"] | None = None
    """[T] True at tokens in whose place the policy was uncertain enough for them to count; None where all do."""
    chosen: Bool[Tensor, " T"] | None = None
    """[T] True at tokens that the algorithm treats apart, chosen over the whole batch; None where it has none."""
