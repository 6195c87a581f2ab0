"""Batches of offline training that carry more than tokens: preferences, judgements, labels, what to tell apart."""

from dataclasses import dataclass
from enum import IntEnum

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlframe.types.batch import Sequences, by_sequence, by_token


@dataclass(kw_only=True, slots=True)
class Examples(Sequences):
    """Sequences to imitate, whose tokens need not count alike."""

    importance: Float[Tensor, " T"] = by_token()
    """[T] how much each token counts beside the others; above 0 where loss_mask is True, else 0.0."""
    channel: Int[Tensor, " R"] = by_sequence()
    """[R] which of `channels` each sequence comes from."""
    channels: tuple[str, ...]
    """Names of the datasets."""


@dataclass(kw_only=True, slots=True)
class Preferences(Sequences):
    """Pairs of responses to one prompt, one preferred to the other: R = 2 * pairs sequences.

    Example: the pair of "7 8 -> 5" over "7 8 -> 6":
        token_ids [7, 8, 5, 7, 8, 6], lengths [3, 3], loss_mask [F, F, T, F, F, T], pair [0, 0], chosen [T, F]
    """

    pair: Int[Tensor, " R"] = by_sequence()
    """[R] which pair each sequence belongs to; each number stands twice, once chosen and once rejected."""
    chosen: Bool[Tensor, " R"] = by_sequence()
    """[R] True for the preferred one of the pair."""
    margin: Float[Tensor, " R"] = by_sequence()
    """[R] by how much the chosen one is better, on both of the pair; 0.0 where the data does not say."""
    reference_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats, frozen reference; present only if the algorithm asks for it."""
    matched: Float[Tensor, " R"] | None = by_sequence(default=None)
    """[R] nats: what a loss that sorts the step's pairs compares each sequence with; present only for one."""
    likelihood_weight: Float[Tensor, " R"] | None = by_sequence(default=None)
    """[R] what the summed negative log-likelihood of each sequence counts in the step, 0.0 on rejected ones; present
    only for a loss with such a term."""

    def units(self) -> Int[Tensor, " R"]:
        """Returns [R] `pair`: a pair's loss needs both of it."""
        return self.pair


@dataclass(kw_only=True, slots=True)
class Judged(Sequences):
    """Responses that are each called desirable or not, as in KTO."""

    desirable: Bool[Tensor, " R"] = by_sequence()
    """[R] True for responses of the kind to learn."""
    kl_nats: Float[Tensor, " R"] = by_sequence()
    """[R] the step's estimate of the KL to the reference, the same on every sequence; 0.0 until it is known."""
    reference_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats, frozen reference; present only if the algorithm asks for it."""


@dataclass(kw_only=True, slots=True)
class Labelled(Sequences):
    """Sequences with one label each; the loss mask is True on the token whose output is judged, the last."""

    label: Float[Tensor, " R"] = by_sequence()
    """[R] index of the class, or the number to predict."""
    group: Int[Tensor, " R"] = by_sequence()
    """[R] the query a sequence belongs to where several are ranked for it; else its own index."""

    def units(self) -> Int[Tensor, " R"]:
        """Returns [R] `group`: a list's loss needs all of it."""
        return self.group


class Role(IntEnum):
    """What a sequence of `Contrasted` is to its group."""

    QUERY = 0
    POSITIVE = 1
    """What the query should be near to."""
    NEGATIVE = 2
    """What resembles it, and the query should be far from: a hard negative."""


@dataclass(kw_only=True, slots=True)
class Contrasted(Sequences):
    """Queries with texts to be near to and far from; the loss mask is True on the token that stands for a text, the
    last.

    Example: two queries, the first with a hard negative, each text a token and an end of text, 9:
        token_ids [1, 9, 2, 9, 3, 9, 4, 9, 5, 9], lengths [2, 2, 2, 2, 2], group [0, 0, 0, 1, 1], role [0, 1, 2, 0, 1]
    """

    group: Int[Tensor, " R"] = by_sequence()
    """[R] which query each sequence belongs to; each number stands once as QUERY and once as POSITIVE."""
    role: Int[Tensor, " R"] = by_sequence()
    """[R] a Role."""
    state_gradient: Float[Tensor, "R H"] | None = by_sequence(default=None)
    """[R, H] derivative of the queries' summed losses with respect to each text's state; None until all states of the
    step are known, like what follows."""
    query_loss: Float[Tensor, " R"] | None = by_sequence(default=None)
    """[R] nats on queries; 0.0 elsewhere."""
    positive_rank: Int[Tensor, " R"] | None = by_sequence(default=None)
    """[R] on queries 1 where nothing is nearer than the positive, 2 where one text is, and so on; 0 elsewhere."""
