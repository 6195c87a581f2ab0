"""Direct preference optimization and the losses that differ from it in one formula.

Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7; the others are named in `rlframe.ops.preference.PairLoss`.
The loss is the mean over the pairs of the optimizer step. `rpo_alpha` adds the negative log-likelihood of the chosen
response per token, Pang et al. 2024, arXiv 2404.19733, equation 1, with the weight on the likelihood as TRL 0.x has it.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import Model, OfflineAlgorithm
from rlframe.ops import preference
from rlframe.ops.preference import LogRatios, PairLoss, PairSettings, pairs
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, Mean, PolicyOutput, Sum
from rlframe.types.supervised import Preferences

DISCOPOP_TEMPERATURE = 0.05
"""Of the paper."""


class ReferenceSource(StrEnum):
    """Where the reference's logprobs come from."""

    LIVE = "live"
    """A forward pass of the frozen weights in each step; the ranks hold a second copy of the weights in host memory."""
    PRECOMPUTED = "precomputed"
    """One pass over all data before training, kept in the run's folder; no second copy."""


@dataclass(kw_only=True, slots=True)
class DpoConfig:
    """DPO's settings."""

    name: str = "dpo"
    """The algorithm."""
    loss: PairLoss = PairLoss.SIGMOID
    """Which loss of the family."""
    mixed_with: dict[str, float] = field(default_factory=dict)
    """Further losses of the family that are added, by name, each with its weight: {bco_pair: 0.25} for MPO's."""
    beta: float = 0.1
    """How strongly the policy is held to the reference; rewards are beta * log(policy / reference)."""
    label_smoothing: float = 0.0
    """Probability that chosen and rejected are the wrong way round; with loss=sigmoid cDPO."""
    discopop_temperature: float = DISCOPOP_TEMPERATURE
    """tau of discopop: how sharply it goes from one of its two losses to the other."""
    rpo_alpha: float = 0.0
    """Weight of the chosen response's negative log-likelihood per token; 0 leaves it out. Without it chosen responses
    may become less likely as long as the rejected ones sink faster (arXiv 2410.08847): watch train/chosen_reward."""
    reference: ReferenceSource = ReferenceSource.LIVE
    """Compute the reference's logprobs step by step, or all of them before training."""

    def __post_init__(self) -> None:
        known = [str(loss) for loss in PairLoss]
        for name, weight in self.mixed_with.items():
            if name not in known or name == self.loss:
                raise ValueError(f"mixed_with must name losses of {', '.join(known)} besides loss, got {name!r}")
            if weight <= 0:
                raise ValueError(f"mixed_with.{name} must be above 0, got {weight}")
        if self.beta <= 0:
            raise ValueError(
                f"beta must be above 0, got {self.beta}: at 0 the loss does not depend on the policy; use sft to learn "
                "from the chosen responses alone"
            )
        self._check_smoothing()
        if self.discopop_temperature != DISCOPOP_TEMPERATURE and PairLoss.DISCOPOP not in self.losses:
            raise ValueError(
                f"discopop_temperature has no effect without discopop, got {self.discopop_temperature}; remove it"
            )
        if not 0 < self.discopop_temperature < 1:
            raise ValueError(f"discopop_temperature must lie in (0, 1), got {self.discopop_temperature}")
        if self.rpo_alpha < 0:
            raise ValueError(f"rpo_alpha must be at least 0, got {self.rpo_alpha}")
        if len([loss for loss in preference.SORTING if loss in self.losses]) > 1:
            raise ValueError("mixed_with must not bring aot and aot_unpaired together: they sort the step differently")

    def _check_smoothing(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}")
        smoothed = [loss for loss in self.losses if loss in preference.SMOOTHED]
        if self.label_smoothing and not smoothed:
            raise ValueError(
                f"label_smoothing has no effect with loss={self.loss}, got {self.label_smoothing}; remove it, or use "
                f"one of {', '.join(preference.SMOOTHED)}"
            )
        needing = [loss for loss in self.losses if loss in (PairLoss.ROBUST, PairLoss.EXO_PAIR)]
        if needing and not self.label_smoothing:
            instead = "is sigmoid" if needing[0] is PairLoss.ROBUST else "is infinite"
            raise ValueError(f"label_smoothing must be above 0 with {needing[0]}, which at 0 {instead}, got 0.0")

    @property
    def losses(self) -> dict[PairLoss, float]:
        """Each loss with its weight."""
        return {self.loss: 1.0} | {PairLoss(name): weight for name, weight in self.mixed_with.items()}


class Dpo(OfflineAlgorithm):
    """The mean over pairs of a loss of how far the policy has moved on either response."""

    data = "preferences"

    def __init__(self, config: DpoConfig):
        self.config = config
        self.needs_reference = config.reference is ReferenceSource.LIVE
        self.precomputes_reference = not self.needs_reference
        self.sorting = next((loss for loss in config.losses if loss in preference.SORTING), None)

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """[T] 1 / pairs of the step."""
        return preference.pair_token_weights(batch)

    def prepare(self, batch: Preferences, model: Model) -> Preferences:
        """With the reference's logprobs, and for aot with what each sequence meets among the step's other pairs."""
        reference = model.logprobs(batch, reference=True)
        batch = replace(batch, reference_logprobs=reference)
        if self.sorting is None:
            return batch
        # Asked of the weights that the loss will see, as offline every batch is one optimizer step.
        policy, frozen = (pairs(sequence_sums(each, batch), batch) for each in (model.logprobs(batch), reference))
        if self.sorting is PairLoss.AOT:
            chosen = rejected = preference.matched_margins(policy[0] - policy[1], frozen[0] - frozen[1])
        else:
            chosen, rejected = preference.matched_ratios(policy[0] - frozen[0], policy[1] - frozen[1])
        return replace(batch, matched=preference.from_pairs(chosen, rejected, batch))

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """sum over pairs of weight * (losses of the family + rpo_alpha * negative log-likelihood per chosen token)."""
        assert batch.reference_logprobs is not None
        config = self.config
        logprobs = sequence_sums(policy.logprobs, batch)
        ratios = logprobs - sequence_sums(batch.reference_logprobs, batch)
        chosen, rejected = pairs(ratios, batch)
        chosen_tokens, rejected_tokens = pairs(preference.response_tokens(batch), batch)
        chosen_matched, rejected_matched = (None, None) if batch.matched is None else pairs(batch.matched, batch)
        of_pairs = LogRatios(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            chosen_matched=chosen_matched,
            rejected_matched=rejected_matched,
        )
        settings = PairSettings(
            beta=config.beta, label_smoothing=config.label_smoothing, temperature=config.discopop_temperature
        )
        of_pair = sum(
            weight * preference.PAIR_LOSSES[name](of_pairs, settings) for name, weight in config.losses.items()
        )
        metrics = preference.pair_metrics(config.beta * ratios, logprobs, weights, batch)
        weight = preference.pair_weights(weights, batch)
        if config.rpo_alpha:
            nll = -pairs(logprobs, batch)[0] / chosen_tokens
            of_pair = of_pair + config.rpo_alpha * nll
            metrics["train/nll_nats"] = Mean(float(nll.detach()[weight > 0].sum()), float((weight > 0).sum()))
        loss = (weight * of_pair).sum()
        metrics["train/loss"] = Sum(float(loss.detach()))
        metrics["train/entropy_nats"] = masked_mean(policy.entropy, batch.loss_mask)
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Dpo, DpoConfig
