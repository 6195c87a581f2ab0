"""Batches: rollouts packed end to end, without padding."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlframe.types.sent import Sent, received, sent
from rlframe.utils.errors import RlframeError

Packed = TypeVar("Packed", bound="Sequences")


class Axis(StrEnum):
    """The first axis of a batch's field. Selecting, packing and device transfers follow it."""

    TOKEN = "token"
    """The axis of T packed tokens."""
    SEQUENCE = "sequence"
    """The axis of R sequences."""


by_token = partial(field, metadata={"axis": Axis.TOKEN})
"""Declares a [T, ...] field."""
by_sequence = partial(field, metadata={"axis": Axis.SEQUENCE})
"""Declares an [R, ...] field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprobs:
    """The teacher's top-k next-token candidates for each of T packed tokens."""

    ids: Int[Tensor, "T k"]
    """[T, k] int32 candidates."""
    logprobs: Float[Tensor, "T k+1"]
    """[T, k + 1] nats of the candidates, and in the last column of all other tokens together. 0.0 at first tokens."""


@dataclass(kw_only=True, slots=True)
class Sequences:
    """R token sequences packed to T tokens: the input of a forward pass.

    Example: two sequences, of 3 and 2 tokens:
        token_ids [7, 8, 5, 9, 4], lengths [3, 2], loss_mask [F, F, T, F, T]
    """

    token_ids: Int[Tensor, " T"] = by_token()
    """[T] int64, sequence after sequence."""
    lengths: Int[Tensor, " R"] = by_sequence()
    """[R] number of tokens of each sequence. Their sum is T."""
    loss_mask: Bool[Tensor, " T"] = by_token()
    """[T] True for tokens that count in the loss. The first token of a sequence has no prediction, so it is False
    there."""
    teacher_top_ids: Int[Tensor, "T k"] | None = by_token(default=None)
    """[T, k] int32 the teacher's most likely tokens in each token's place. Present only if the algorithm compares
    itself with the teacher's top k."""
    teacher_top_logprobs: Float[Tensor, "T k+1"] | None = by_token(default=None)
    """[T, k + 1] nats of `teacher_top_ids`, and in the last column of all other tokens together. 0.0 at first tokens.
    Present if the ids are."""
    routes: Shaped[Tensor, "T layers k"] | None = by_token(default=None)
    """[T, layers, k] experts that each token was routed to in the engine, in each layer that has experts: layers * k
    bytes a token (uint8; int16 above 256 experts). 0 at the last token of a sequence, which the engine never processed.
    Present only if the routers must choose the same."""
    shared: Int[Tensor, " R"] | None = by_sequence(default=None)
    """[R] number of first tokens of each sequence that are not computed again, because they are those of the last
    sequence before it with a 0 here. Set only where micro-batches are made. None if every sequence is computed
    whole."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences R."""
        return int(self.lengths.numel())

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens T."""
        return int(self.token_ids.numel())

    def sequence_index(self) -> Int[Tensor, " T"]:
        """Returns [T] the index (0..R-1) of each token's sequence."""
        # A device that had to say how many there are would stop the host.
        return torch.repeat_interleave(self.lengths, output_size=self.num_tokens)

    def units(self) -> Int[Tensor, " R"]:
        """Returns [R] the index of each sequence's unit. Sequences of one unit must share a micro-batch. Here each
        sequence is a unit of its own."""
        return torch.arange(self.num_sequences)

    def families(self) -> Int[Tensor, " R"]:
        """Returns [R] the index of each sequence's family: sequences that probably begin with the same tokens."""
        return self.units()

    def select(self: Packed, indices: list[int]) -> Packed:
        """Returns the sequences `indices`, in that order, packed again. Every field follows by its axis."""
        rows = torch.tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        shifts = (torch.cumsum(self.lengths, 0) - self.lengths)[rows] - (torch.cumsum(lengths, 0) - lengths)
        picks = {
            Axis.SEQUENCE: rows,
            Axis.TOKEN: torch.arange(int(lengths.sum())) + torch.repeat_interleave(shifts, lengths),
        }
        return self.each(lambda value, axis: value[picks[axis]])

    def part(self: Packed, start: int, stop: int) -> Packed:
        """Returns the sequences from `start` to before `stop`. Its tensors are parts of this batch's, not copies."""
        first, count = int(self.lengths[:start].sum()), int(self.lengths[start:stop].sum())
        parts = {Axis.SEQUENCE: slice(start, stop), Axis.TOKEN: slice(first, first + count)}
        return self.each(lambda value, axis: value[parts[axis]])

    def each(self: Packed, change: Callable[[Tensor, Axis], Tensor]) -> Packed:
        """Returns the batch with `change` applied to every tensor field."""
        changed = {
            known.name: change(value, known.metadata["axis"])
            for known in fields(self)
            if isinstance(value := getattr(self, known.name), Tensor)
        }
        return replace(self, **changed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the tensors as arrays; see `rlframe.types.sent`."""
        return _unpickled, (type(self), sent({known.name: getattr(self, known.name) for known in fields(self)}))


def _unpickled(kind: type[Packed], message: Sent) -> Packed:
    return kind(**received(message))


@dataclass(kw_only=True, slots=True)
class Batch(Sequences):
    """R rollouts packed to T tokens, before advantages are known."""

    rollout_logprobs: Float[Tensor, " T"] = by_token()
    """[T] nats of the engine that sampled. 0.0 where loss_mask is False."""
    group: Int[Tensor, " R"] = by_sequence()
    """[R] index (0..P-1) of each rollout's prompt."""
    rewards: Float[Tensor, " R"] = by_sequence()
    """[R] reward of each rollout. NaN if no reward function scored it."""
    attempt: Int[Tensor, " R"] | None = by_sequence(default=None)
    """[R] index of each rollout's attempt, which may have several sequences, each with the attempt's reward. None if
    every attempt is one sequence."""
    versions: Int[Tensor, " T"] = by_token()
    """[T] int32 policy version that sampled each token. OFFLINE_VERSION if no policy sampled it."""
    token_rewards: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] rewards that environments gave at single tokens, in addition to `rewards`. None if none did."""
    turns: Int[Tensor, " T"] | None = by_token(default=None)
    """[T] int32 index in its attempt of the turn that sampled each token, -1 for tokens that no turn sampled. Tokens
    that are left out of the loss keep theirs. None if no attempt has several turns."""
    states: Int[Tensor, " T"] | None = by_token(default=None)
    """[T] int64 number of the state that the token's turn was given in: equal for equal states. 0 for tokens that no
    turn sampled. Present if turns are."""
    old_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats of the policy before the update. None if the update uses those of its own first forward pass."""
    reference_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats of the frozen reference. Present only if the algorithm needs it."""
    teacher_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats of the teacher. Present only if the algorithm needs it."""
    values: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] critic's value of the state before each token. Present only if the algorithm needs it."""
    returns: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] the critic's target for the state before each token. 0.0 where loss_mask is False. Present if values are."""
    truncated: Bool[Tensor, " R"] | None = by_sequence(default=None)
    """[R] True if the rollout ends an attempt that was cut off and did not end by itself. None if unknown."""
    reward_parts: Float[Tensor, "R K"] | None = by_sequence(default=None)
    """[R, K] unweighted values of the K reward functions. NaN if one did not score the rollout. None if unknown."""
    part_weights: Float[Tensor, "R K"] | None = by_sequence(default=None)
    """[R, K] weights of the reward functions, the same in every row. Present if reward_parts are."""

    def families(self) -> Int[Tensor, " R"]:
        """Returns [R] `group`, because the rollouts of a group answer one prompt."""
        return self.group

    def with_advantages(self, advantages: Float[Tensor, " T"]) -> "TrainBatch":
        """Returns the same batch with advantages: the only kind that reaches an online loss.

        Raises:
            RlframeError: an algorithm has computed something else than a finite number for each token.
        """
        found = f"{list(advantages.shape)} of {advantages.dtype}"
        if advantages.shape != self.token_ids.shape or not advantages.is_floating_point():
            raise RlframeError(
                f"the algorithm's advantages must be floating-point numbers of shape [{self.num_tokens}], one for each "
                f"token of the batch, got {found}"
            )
        # Elsewhere the host would wait for the device.
        if advantages.device.type == "cpu" and (count := int((~advantages.isfinite()).sum())):
            raise RlframeError(f"the algorithm's advantages must be finite, got {count} that are not, of {found}")
        return TrainBatch(advantages=advantages, **{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(kw_only=True, slots=True)
class TrainBatch(Batch):
    """A Batch with advantages."""

    advantages: Float[Tensor, " T"] = by_token()
    """[T] advantage of each sampled token; 0.0 where loss_mask is False."""
    uncertain: Bool[Tensor, " T"] | None = by_token(default=None)
    """[T] True for tokens at which the policy was uncertain enough for them to count. None if all tokens count."""
    chosen: Bool[Tensor, " T"] | None = by_token(default=None)
    """[T] True for tokens that the algorithm treats differently, chosen over the whole batch. None if there are
    none."""
    kept: Bool[Tensor, " R"] | None = by_sequence(default=None)
    """[R] True for sequences whose logprobs the training pass returns; see `TrainResult.kept_logprobs`. None if
    nobody asks for any."""
