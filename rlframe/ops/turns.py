"""Credit by turn: what each turn of an attempt has earned from there on, compared with other turns of its group."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.types.batch import Batch

NO_TURN = -1
"""Turn of a token that is in none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """U turns of a batch's attempts, each once, in the order of attempts and of turns."""

    of_token: Int[Tensor, " T"]
    """[T] index of each token's turn, NO_TURN outside of turns."""
    attempt: Int[Tensor, " U"]
    """[U] index (0..A-1) of each turn's attempt."""
    place: Int[Tensor, " U"]
    """[U] index of each turn in its attempt, from 0."""
    group: Int[Tensor, " U"]
    """[U] index of each turn's prompt."""
    state: Int[Tensor, " U"]
    """[U] number of the state that each turn was given in. Equal numbers are equal states."""
    num_attempts: int

    @property
    def last(self) -> Int[Tensor, " A"]:
        """[A] index of the last turn of each attempt, NO_TURN for one without any."""
        found = torch.full((self.num_attempts,), NO_TURN)
        return found.scatter_reduce_(0, self.attempt, torch.arange(len(self.attempt)), "amax")

    def on_tokens(self, values: Float[Tensor, " U"], batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] each turn's value on its tokens in the loss, 0.0 on the others."""
        inside = self.of_token != NO_TURN
        found = torch.zeros(len(self.of_token), dtype=values.dtype)
        found[inside] = values[self.of_token[inside]]
        return found * batch.loss_mask

    def sums(self, values: Float[Tensor, " T"]) -> Float[Tensor, " U"]:
        """Returns [U] the sum of values over each turn's tokens, in the loss or not."""
        inside = self.of_token != NO_TURN
        return torch.zeros(len(self.place), dtype=values.dtype).index_add_(0, self.of_token[inside], values[inside])


def attempts_of(batch: Batch) -> Int[Tensor, " R"]:
    """Returns [R] the index (0..A-1) of each rollout's attempt among those of the batch."""
    if batch.attempt is None:
        return torch.arange(batch.num_sequences)
    return torch.unique(batch.attempt, return_inverse=True)[1]


def turns_of(batch: Batch) -> Turns:
    """Returns the turns of a batch, a part of a group's attempts included. A batch that knows no turns has one in each
    attempt."""
    attempt = attempts_of(batch)
    sequence = batch.sequence_index()
    place = torch.zeros_like(sequence) if batch.turns is None else batch.turns.long()
    inside = place != NO_TURN
    width = int(place.max()) + 1 if place.numel() else 1
    # Each turn has tokens of one sequence only, so that its first token knows everything about it.
    keys, own = torch.unique(attempt[sequence[inside]] * width + place[inside], return_inverse=True)
    of_token = torch.full_like(sequence, NO_TURN).masked_scatter_(inside, own)
    tokens = inside.nonzero()[:, 0]
    first = torch.full((len(keys),), batch.num_tokens).scatter_reduce_(0, own, tokens, "amin")
    return Turns(
        of_token=of_token,
        attempt=keys // width,
        place=keys % width,
        group=batch.group[sequence[first]],
        state=torch.zeros_like(keys) if batch.states is None else batch.states[first],
        num_attempts=int(attempt.max()) + 1 if len(attempt) else 0,
    )


def turn_rewards(batch: Batch, turns: Turns, penalty: Float[Tensor, " T"]) -> Float[Tensor, " U"]:
    """Returns [U] the reward of each turn: the rewards at its tokens, for the last turn of an attempt also the
    attempt's own, minus the penalty of its tokens."""
    attempt = attempts_of(batch)
    own = torch.zeros(turns.num_attempts, dtype=batch.rewards.dtype).index_copy_(0, attempt, batch.rewards)
    rewards = torch.zeros(len(turns.place), dtype=own.dtype)
    rewards[turns.last[turns.last != NO_TURN]] = own[turns.last != NO_TURN]
    if batch.token_rewards is not None:
        rewards = rewards + turns.sums(batch.token_rewards)
    return rewards - turns.sums(penalty)


def turn_returns(rewards: Float[Tensor, " U"], turns: Turns, *, discount: float) -> Float[Tensor, " U"]:
    """Returns [U] what each turn has earned from there on: R_t = sum over k >= t of discount^(k - t) * r_k, where r_k
    is the reward of turn k of the same attempt.

    Source: Feng et al. 2025, arXiv 2505.10978 (GiGPO), section 4.2, the discounted return of a step.
    """
    # One row for each place, so that the loop runs over the turns of the longest attempt only.
    table = torch.zeros(int(turns.place.max()) + 1 if len(turns.place) else 0, turns.num_attempts, dtype=rewards.dtype)
    table[turns.place, turns.attempt] = rewards
    for place in range(len(table) - 2, -1, -1):
        table[place] += discount * table[place + 1]
    return table[turns.place, turns.attempt]


def together(*values: Int[Tensor, " U"]) -> Int[Tensor, " U"]:
    """Returns [U] the same number (0, 1, ...) for turns that agree in all of `values`."""
    return torch.unique(torch.stack(values, 1), dim=0, return_inverse=True)[1]
