"""Results of model forward passes, losses and workers."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutput:
    """Outputs of the language model for the tokens of a micro-batch, aligned with them."""

    logprobs: Float[Tensor, " T"]
    """[T] nats of each token given the ones before it, at the sampling temperature; 0.0 at a sequence's first token,
    and at tokens that `loss_mask` leaves out, whose logits are not computed."""
    entropy: Float[Tensor, " T"]
    """[T] nats, of the distribution each token was drawn from; 0.0 at the same tokens."""
    renyi_entropy: Float[Tensor, " T"] | None = None
    """[T] nats, Renyi entropy of order 2: -log sum_v p(v)^2 of the same distribution, without gradient. 0.0 at the
    same tokens. Only with Output.TOKENS_WITH_RENYI_ENTROPY."""


class Rest(StrEnum):
    """Treatment of all other tokens in a divergence over a teacher's k most likely tokens."""

    ONE_OUTCOME = "one_outcome"
    """The other tokens count as one more token. The divergence is never below 0 nor above the whole divergence."""
    RENORMALIZED = "renormalized"
    """Both models are renormalised over the k tokens, as in ms-swift: a student that moves its mass elsewhere looks
    perfect."""
    LEFT_OUT = "left_out"
    """The sum stops after the k tokens, as verl's `forward_kl_topk` (beta 0): no divergence, and can fall below 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The divergence from the teacher that the ranks compute; see `rlframe.megatron.vocab.divergence`."""

    beta: float
    """Interpolation of the divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), between them is the
    generalised Jensen-Shannon divergence."""
    temperature: float
    """Divisor of both models' logits."""
    top_k: int = 0
    """Number of the teacher's most likely tokens; see `rlframe.megatron.vocab.top_k`. 0 means all tokens."""
    rest: Rest = Rest.ONE_OUTCOME
    """Treatment of all other tokens, with top_k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceOutput(PolicyOutput):
    """A PolicyOutput with the divergence of the model from its teacher."""

    divergence: Float[Tensor, " T"]
    """[T] nats, between the distributions each token was drawn from; 0.0 at a sequence's first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueOutput:
    """Outputs of a model with a head of C outputs for the tokens of a micro-batch, aligned with them."""

    values: Float[Tensor, "T C"]
    """[T, C] float32 given each token and those before it: a critic's value, a reward, or the logits of C classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateOutput:
    """The model's last hidden states, after its final norm."""

    states: Float[Tensor, "T H"]
    """[T, H] float32."""


class Output(StrEnum):
    """Model outputs that a loss can read. They decide the model's head."""

    TOKENS = "tokens"
    """A PolicyOutput, from the language-model head."""
    TOKENS_WITH_RENYI_ENTROPY = "tokens_with_renyi_entropy"
    """The same with `renyi_entropy`."""
    DIVERGENCE = "divergence"
    """A DivergenceOutput, from the language-model heads of the model and of its teacher."""
    VALUES = "values"
    """A ValueOutput, from a linear layer with C outputs that replaces the language-model head."""
    STATES = "states"
    """A StateOutput; the model has no head."""


Number = float | Tensor
"""A number, or a tensor of one number, which a loss leaves on its device until `merge` fetches all."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as sum and count, so that partial results of any split add up to the same mean."""

    total: Number
    count: Number

    def __add__(self, other: "Mean") -> "Mean":
        return type(self)(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """total / count, or 0.0 if nothing was counted."""
        return float(self.total) / float(self.count) if self.count else 0.0


@dataclass(frozen=True, slots=True)
class MeanIfAny(Mean):
    """A mean that `merge` leaves out of a step in which nothing was counted, where 0.0 would say something else."""


@dataclass(frozen=True, slots=True)
class Peak:
    """A metric whose partial results combine by maximum. NaN is greater than any number."""

    value: Number
    """The greatest value. -inf is that of nothing, and `merge` leaves it out."""

    def __add__(self, other: "Peak") -> "Peak":
        # max would keep NaN on one side only.
        return self if self.value != self.value or self.value >= other.value else other


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric whose partial results add up. Over several optimizer steps the mean is reported."""

    value: Number

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class EffectiveSize:
    """The effective number of weighted samples divided by their number, from sums that add up over any split."""

    total: Number
    """Sum of the weights."""
    squares: Number
    """Sum of the squared weights."""
    count: Number
    """Number of weights."""

    def __add__(self, other: "EffectiveSize") -> "EffectiveSize":
        return EffectiveSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        """total^2 / squares / count, in [0, 1]. 0.0 if no weight is above 0."""
        return float(self.total) ** 2 / float(self.squares) / float(self.count) if self.squares else 0.0


Metric = Mean | Peak | Sum | EffectiveSize


def settled(metrics: Sequence[Mapping[str, Metric]]) -> list[dict[str, Metric]]:
    """Returns the same metrics in plain numbers. All tensors of a dtype and a device are fetched at once.

    A host that read a number right after a loss would wait for the device, and the device would then wait for the host.
    """
    waiting: defaultdict[tuple[Any, Any], list[Tensor]] = defaultdict(list)
    for share in metrics:
        for value in numbers(share):
            waiting[value.dtype, value.device].append(value)
    fetched = {key: iter(torch.stack(values).tolist()) for key, values in waiting.items()}

    def plain(metric: Metric) -> Metric:
        values = (getattr(metric, each.name) for each in fields(metric))
        return type(metric)(
            *(float(next(fetched[each.dtype, each.device])) if isinstance(each, Tensor) else each for each in values)
        )

    return [{key: plain(metric) for key, metric in share.items()} for share in metrics]


def numbers(share: Mapping[str, Metric]) -> Iterator[Tensor]:
    """Yields the tensors in metrics, in the order of their fields."""
    for metric in share.values():
        for each in fields(metric):
            if isinstance(value := getattr(metric, each.name), Tensor):
                yield value


def merge(shares: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Returns the metrics of one optimizer step in plain numbers, from those of its micro-batches on all ranks."""
    merged: dict[str, Metric] = {}
    for share in settled(list(shares)):
        for key, metric in share.items():
            merged[key] = merged[key] + metric if key in merged else metric  # pyright: ignore[reportOperatorIssue]
    return {key: metric for key, metric in merged.items() if not of_nothing(metric)}


def of_nothing(metric: Metric) -> bool:
    """Returns whether nothing was counted that a metric in plain numbers could speak of."""
    if isinstance(metric, MeanIfAny):
        return not metric.count
    return isinstance(metric, Peak) and float(metric.value) == -math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """A micro-batch's share of the loss. Shares of all ranks and micro-batches add up to the loss of the step."""

    loss: Float[Tensor, ""]
    """Scalar with gradient: a sum whose denominators, already inside the token weights, are global."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Metrics by key `area/name_unit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """Result of the training pass of one micro-batch, on one rank of the last pipeline stage."""

    metrics: dict[str, Metric]
    """Metrics of its share of the loss."""
    kept_logprobs: Float[Tensor, " T_kept"]
    """[T_kept] nats of the sequences that are marked as `kept`, on the CPU. Empty if none is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """Result of one optimizer step on one rank."""

    metrics: dict[str, Metric]
    """Metrics merged over the rank's micro-batches."""
    kept_logprobs: list[Float[Tensor, " T_kept"]] = field(default_factory=list)
    """See PassResult, for each micro-batch. Empty unless this rank reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of one call of `policy.train`."""

    metrics: dict[str, float]
    """Metrics merged over ranks, micro-batches and optimizer steps."""
    num_optimizer_steps: int
    kept_logprobs: Float[Tensor, " T_kept"] | None = None
    """[T_kept] nats of the batch's sequences that are marked as `kept`, one after the other, under the weights of their
    first training pass: in a step of one update those before it. None if none is marked."""
