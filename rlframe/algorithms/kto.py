"""Kahneman-Tversky optimization: learns from responses that are each labelled desirable or not.

Source: Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1; `apo_zero_unpaired` is equation 7 of D'Oosterlinck et al.
2024, arXiv 2408.06266, without pairs. The loss is the mean over the sequences of the optimizer step.

TRL and ms-swift estimate the KL from each sequence's prompt with the response of the one before it, in the order of the
data and within one device's batch; here a hash of the tokens pairs the step's sequences, the same in every order and
layout. TRL can compute the reference's logprobs of those mismatched pairs before training; here they are new in each
step, so `reference=precomputed` needs apo_zero_unpaired.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.algorithms.reference import ReferenceSource, ReferenceUpdateConfig
from rlframe.ops.comparisons.preference import mismatched
from rlframe.ops.sequences import sequence_sums, sequence_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, MeanIfAny, Metric, PolicyOutput, Sum
from rlframe.types.supervised import Unpaired
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

BALANCE = (1.0, 4 / 3)
"""Range that the paper recommends for (desirable weight * count) / (undesirable weight * count)."""


class KtoLoss(StrEnum):
    """Losses of KTO. r is log policy - log reference of the response, z the KL estimate of the step."""

    KTO = "kto"
    """1 - sigmoid(beta (r - z)) if desirable, else 1 - sigmoid(beta (z - r))."""
    APO_ZERO_UNPAIRED = "apo_zero_unpaired"
    """1 - sigmoid(beta r) if desirable, else sigmoid(beta r): KTO's with z = 0, and no passes to estimate it."""


@dataclass(kw_only=True, slots=True)
class KtoConfig:
    """KTO's settings."""

    name: str = "kto"
    """Name of the algorithm."""
    loss: KtoLoss = KtoLoss.KTO
    """The loss of a response."""
    beta: Annotated[float, Range(above=0, maximum=1e4, note="at 0 the loss does not depend on the policy")] = 0.1
    """Strength with which the policy is held to the reference: rewards are beta * log(policy / reference)."""
    desirable_weight: Annotated[float, Range(0, 1e4)] = 1.0
    """Weight of desirable responses."""
    undesirable_weight: Annotated[float, Range(0, 1e4)] = 1.0
    """Weight of undesirable responses."""

    reference: ReferenceSource = ReferenceSource.LIVE
    """Whether the reference's logprobs are computed in each step, or, with apo_zero_unpaired, all of them before
    training."""
    reference_update: ReferenceUpdateConfig = field(default_factory=ReferenceUpdateConfig)
    """Rule by which the reference follows the policy (TR-DPO)."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.desirable_weight == self.undesirable_weight == 0:
            raise SettingError("desirable_weight", "must be above 0 if undesirable_weight is 0", got="0.0")
        if self.reference is ReferenceSource.LIVE:
            return
        if self.loss is KtoLoss.KTO:
            raise SettingError(
                "reference",
                "must be live with loss=kto",
                got="precomputed",
                why="its KL estimate pairs prompts with responses of other prompts, which change in each step",
                hint="or use loss=apo_zero_unpaired",
            )
        self.reference_update.check_live()


class Kto(OfflineAlgorithm):
    """Raises desirable responses above, and lowers undesirable ones below, the policy's distance to the reference."""

    data = "unpaired"

    def __init__(self, config: KtoConfig):
        self.config = config
        self.needs_reference = config.reference is ReferenceSource.LIVE
        self.precomputes_reference = not self.needs_reference
        self.reference_update = config.reference_update
        self.smallest_step = 2 if config.loss is KtoLoss.KTO else 1

    def warning(self, batches: Iterable[Unpaired]) -> str | None:
        """Returns a warning if the two classes are not balanced as the paper recommends."""
        config = self.config
        desirable = total = 0
        for batch in batches:
            desirable += int(batch.desirable.sum())
            total += batch.num_sequences
        given, taken = config.desirable_weight * desirable, config.undesirable_weight * (total - desirable)
        low, high = BALANCE
        if low * taken <= given <= high * taken:
            return None
        ratio = f"{given / taken:.3g}" if taken else "infinite"
        return (
            f"algorithm.desirable_weight={config.desirable_weight} * {desirable} desirable responses is "
            f"{ratio} times algorithm.undesirable_weight={config.undesirable_weight} * {total - desirable} "
            f"undesirable ones; KTO's paper recommends a ratio between {low:g} and {high:.3g}"
        )

    def token_weights(self, batch: Unpaired) -> Float[Tensor, " T"]:
        """Returns [T] 1 / sequences of the step, fully masked ones included."""
        return batch.loss_mask.float() / max(batch.num_sequences, 1)

    def prepare(self, batch: Unpaired, model: ForwardModel) -> Unpaired:
        """Returns the batch with the reference's logprobs and the step's estimate of the KL: max(0, mean over
        mismatched pairs of prompt and response of log policy - log reference)."""
        batch = replace(batch, reference_logprobs=model.logprobs(batch, reference=True))
        if self.config.loss is not KtoLoss.KTO or batch.num_sequences < self.smallest_step:
            return batch
        others = mismatched(batch)
        ratios = sequence_sums(model.logprobs(others) - model.logprobs(others, reference=True), others)
        return replace(batch, kl_nats=ratios.mean().clamp(min=0).expand(batch.num_sequences).clone())

    def loss(self, policy: PolicyOutput, batch: Unpaired, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over sequences of weight * weight of the class * loss."""
        assert batch.reference_logprobs is not None
        config = self.config
        ratios = sequence_sums(policy.logprobs, batch) - sequence_sums(batch.reference_logprobs, batch)
        # 1 - sigmoid(x) is sigmoid(-x).
        distance = config.beta * (ratios - batch.kl_nats)
        of_sequence = torch.where(
            batch.desirable,
            config.desirable_weight * torch.sigmoid(-distance),
            config.undesirable_weight * torch.sigmoid(distance),
        )
        weight = sequence_weights(weights, batch)
        loss = (weight * of_sequence).sum()
        metrics = self._metrics(config.beta * ratios.detach(), distance.detach(), weight > 0, batch)
        metrics["train/loss"] = Sum(loss.detach())
        metrics["train/entropy_nats"] = masked_mean(policy.entropy, batch.loss_mask)
        return LossOutput(loss=loss, metrics=metrics)

    def _metrics(
        self, rewards: Float[Tensor, " R"], distance: Float[Tensor, " R"], counted: Tensor, batch: Unpaired
    ) -> dict[str, Metric]:
        """Returns means over the sequences that count. Those of a class are left out of a step that has none of it."""
        right = (distance > 0) == batch.desirable
        metrics: dict[str, Metric] = {
            "train/accuracy": masked_mean(right.float(), counted),
            "train/kl_nats": masked_mean(batch.kl_nats, counted),
        }
        for name, members in (("desirable", batch.desirable), ("undesirable", ~batch.desirable)):
            metrics[f"train/{name}_reward"] = masked_mean(rewards, counted & members, MeanIfAny)
        return metrics


COMPONENT, CONFIG = Kto, KtoConfig
