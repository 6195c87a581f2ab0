"""What a loss and a worker give back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutput:
    """What the model says about the tokens of a micro-batch, aligned with them."""

    logprobs: Float[Tensor, " T"]
    """[T] nats of each token given the ones before it, at the sampling temperature; 0.0 at a sequence's first token."""
    entropy: Float[Tensor, " T"]
    """[T] nats, of the distribution each token was drawn from; 0.0 at a sequence's first token."""
    renyi_entropy: Float[Tensor, " T"] | None = None
    """[T] nats, of order 2: -log sum_v p(v)^2 of the same distribution, without a gradient; 0.0 at first tokens. Only
    with Output.TOKENS_WITH_RENYI_ENTROPY."""


class Rest(StrEnum):
    """What a divergence over a teacher's k likeliest tokens makes of the others."""

    ONE_OUTCOME = "one_outcome"
    """They count as one more token: never below 0 nor above the whole divergence."""
    RENORMALIZED = "renormalized"
    """Both models are renormalised over the k tokens, as in ms-swift: a student that moves its mass elsewhere looks
    perfect."""
    LEFT_OUT = "left_out"
    """The sum stops after the k tokens, as verl's `forward_kl_topk` (beta 0): no divergence, and can fall below 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Which divergence from the teacher a loss wants the ranks to compute: see `rlframe.megatron.vocab.divergence`."""

    beta: float
    """0 is KL(teacher || student), 1 KL(student || teacher), between them the generalised Jensen-Shannon divergence."""
    temperature: float
    """Both models' logits are divided by it."""
    top_k: int = 0
    """Over the teacher's k likeliest tokens: see `rlframe.megatron.vocab.top_k`. 0: over all tokens."""
    rest: Rest = Rest.ONE_OUTCOME
    """What becomes of all other tokens, of a divergence over the k likeliest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceOutput(PolicyOutput):
    """A PolicyOutput, and how far the model is from its teacher."""

    divergence: Float[Tensor, " T"]
    """[T] nats, between the distributions each token was drawn from; 0.0 at a sequence's first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueOutput:
    """What a model with a head of C outputs says about the tokens of a micro-batch, aligned with them."""

    values: Float[Tensor, "T C"]
    """[T, C] float32: a critic's value, a reward, or the logits of C classes, given the tokens up to and with this one.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class StateOutput:
    """The model's last hidden states, behind its final norm."""

    states: Float[Tensor, "T H"]
    """[T, H] float32."""


class Output(StrEnum):
    """What a loss reads of a model, and so which head the model has."""

    TOKENS = "tokens"
    """A PolicyOutput, from the language-model head."""
    TOKENS_WITH_RENYI_ENTROPY = "tokens_with_renyi_entropy"
    """The same, with `renyi_entropy`."""
    DIVERGENCE = "divergence"
    """A DivergenceOutput, from the language-model heads of the model and of its teacher."""
    VALUES = "values"
    """A ValueOutput, from a linear layer with C outputs in the place of the language-model head."""
    STATES = "states"
    """A StateOutput; the model has no head."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as sum and count, so that partial results of any split add up to the same mean."""

    total: float
    count: float

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """total / count, or 0.0 when nothing was counted."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Peak:
    """A metric whose partial results combine by maximum."""

    value: float

    def __add__(self, other: "Peak") -> "Peak":
        return Peak(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric whose partial results add up; over several optimizer steps the mean is reported."""

    value: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class EffectiveSize:
    """The effective number of weighted samples as a part of their number, from sums that add up over any split."""

    total: float
    """Sum of the weights."""
    squares: float
    """Sum of their squares."""
    count: float
    """How many there are."""

    def __add__(self, other: "EffectiveSize") -> "EffectiveSize":
        return EffectiveSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        """total^2 / squares / count, in [0, 1]; 0.0 when no weight is above 0."""
        return self.total**2 / self.squares / self.count if self.squares else 0.0


Metric = Mean | Peak | Sum | EffectiveSize


def merge(shares: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of one optimizer step, from those of its micro-batches on all ranks."""
    merged: dict[str, Metric] = {}
    for share in shares:
        for key, metric in share.items():
            merged[key] = merged[key] + metric if key in merged else metric  # pyright: ignore[reportOperatorIssue]
    return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """A micro-batch's share of the loss. Shares of all ranks and micro-batches add up to the loss of the step."""

    loss: Float[Tensor, ""]
    """Scalar with gradient: a sum whose denominators, already inside the token weights, are global."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """By key `area/name_unit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What one call of `policy.train` did."""

    metrics: dict[str, float]
    """Merged over ranks, micro-batches and optimizer steps."""
    num_optimizer_steps: int
