"""Batches of offline training with data besides tokens: importances, preferences, labels, contrasts."""

from dataclasses import dataclass
from enum import IntEnum

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlframe.types.batch import Sequences, by_sequence, by_token


@dataclass(kw_only=True, slots=True)
class Examples(Sequences):
    """Sequences to imitate, whose tokens may have different weights."""

    importance: Float[Tensor, " T"] = by_token()
    """[T] weight of each token relative to the others. Above 0 where loss_mask is True, else 0.0."""
    channel: Int[Tensor, " R"] = by_sequence()
    """[R] index into `channels` of each sequence."""
    channels: tuple[str, ...]
    """Names of the datasets."""


@dataclass(kw_only=True, slots=True)
class Preferences(Sequences):
    """Pairs of responses to one prompt, one preferred to the other: R = 2 * pairs sequences.

    Example: the pair of "7 8 -> 5" over "7 8 -> 6":
        token_ids [7, 8, 5, 7, 8, 6], lengths [3, 3], loss_mask [F, F, T, F, F, T], pair [0, 0], chosen [T, F]
    """

    pair: Int[Tensor, " R"] = by_sequence()
    """[R] index of each sequence's pair. Each index occurs twice, once chosen and once rejected."""
    chosen: Bool[Tensor, " R"] = by_sequence()
    """[R] True for the preferred one of the pair."""
    margin: Float[Tensor, " R"] = by_sequence()
    """[R] margin by which the chosen response is better, on both of the pair. 0.0 if the data states none."""
    reference_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats of the frozen reference. Present only if the algorithm needs it."""
    matched: Float[Tensor, " R"] | None = by_sequence(default=None)
    """[R] nats that each sequence is compared with in a loss that sorts the step's pairs. Present only for such a
    loss."""
    likelihood_weight: Float[Tensor, " R"] | None = by_sequence(default=None)
    """[R] weight in the step of each sequence's summed negative log-likelihood, 0.0 on rejected ones. Present only for
    a loss with such a term."""

    def units(self) -> Int[Tensor, " R"]:
        """Returns [R] `pair`, because the loss of a pair needs both sequences."""
        return self.pair


@dataclass(kw_only=True, slots=True)
class Unpaired(Sequences):
    """Responses that are each labelled desirable or not, as in KTO."""

    desirable: Bool[Tensor, " R"] = by_sequence()
    """[R] True for desirable responses."""
    kl_nats: Float[Tensor, " R"] = by_sequence()
    """[R] the step's estimate of the KL to the reference, the same on every sequence. 0.0 until it is computed."""
    reference_logprobs: Float[Tensor, " T"] | None = by_token(default=None)
    """[T] nats of the frozen reference. Present only if the algorithm needs it."""


@dataclass(kw_only=True, slots=True)
class Labelled(Sequences):
    """Sequences with one label each. The loss mask is True on the last token, whose output is scored."""

    label: Float[Tensor, " R"] = by_sequence()
    """[R] index of the class, or the number to predict."""
    group: Int[Tensor, " R"] = by_sequence()
    """[R] index of a sequence's query if several are ranked for it, else its own index."""

    def units(self) -> Int[Tensor, " R"]:
        """Returns [R] `group`, because the loss of a list needs all of it."""
        return self.group


class Role(IntEnum):
    """Role of a sequence of `Contrasted` in its group."""

    QUERY = 0
    POSITIVE = 1
    """A text that the query should be near to."""
    NEGATIVE = 2
    """A text that resembles the positive and that the query should be far from: a hard negative."""


@dataclass(kw_only=True, slots=True)
class Contrasted(Sequences):
    """Queries with texts to be near to and far from. The loss mask is True on the last token, which represents the
    text.

    Example: two queries, the first with a hard negative, each text a token and an end of text, 9: token_ids [1, 9, 2,
    9, 3, 9, 4, 9, 5, 9], lengths [2, 2, 2, 2, 2], group [0, 0, 0, 1, 1], role [0, 1, 2, 0, 1]
    """

    group: Int[Tensor, " R"] = by_sequence()
    """[R] index of each sequence's query. Each index occurs once as QUERY and once as POSITIVE."""
    role: Int[Tensor, " R"] = by_sequence()
    """[R] a Role."""
    state_gradient: Float[Tensor, "R H"] | None = by_sequence(default=None)
    """[R, H] derivative of the queries' summed losses with respect to each text's state. This and the following fields
    are None until all states of the step are known."""
    query_loss: Float[Tensor, " R"] | None = by_sequence(default=None)
    """[R] nats of the loss on queries. 0.0 elsewhere."""
    positive_rank: Int[Tensor, " R"] | None = by_sequence(default=None)
    """[R] rank of the positive on queries: 1 if no text is nearer, 2 if one text is, and so on. 0 elsewhere."""
