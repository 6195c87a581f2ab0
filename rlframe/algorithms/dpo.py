"""Direct preference optimization and the losses that differ from it in one formula.

Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7; the others are named in
`ops.comparisons.preference.PairLoss`, other divergences than the reverse KL in `ops.comparisons.f_divergence`. The loss
is the mean over the pairs of the optimizer step. `rpo_alpha` adds the negative log-likelihood of the chosen response
per token, Pang et al. 2024, arXiv 2404.19733, equation 1, with the weight on the likelihood as TRL 0.x has it; TRL 1.16
has it as the loss `sft`, which is `likelihood_mean=tokens` here.

TRL 1.16 differs in that its `sigmoid` and `sigmoid_norm` do not look at the label smoothing; that its `use_weighting`
weighs the `sft` term too, where the paper and `wpo` here weigh the preference alone; and that it adds the router's
auxiliary loss of a mixture of experts by default, which here is train.moe.aux_loss_coefficient. ms-swift's BCO has a
running shift of the rewards, which `bco_pair` here and in TRL lacks.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.algorithms.reference import ReferenceSource, ReferenceUpdateConfig
from rlframe.ops.comparisons import preference
from rlframe.ops.comparisons.f_divergence import FDivergence
from rlframe.ops.comparisons.preference import LikelihoodMean, LogRatios, PairLoss, PairSettings, pairs
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, Output, PolicyOutput, Sum
from rlframe.types.supervised import Preferences
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

DISCOPOP_TEMPERATURE = 0.05
"""Temperature of the DiscoPOP loss, from the paper."""
F_ALPHA = 0.5
"""Default alpha of the alpha-divergence, as in TRL: the middle."""


@dataclass(kw_only=True, slots=True)
class DpoConfig:
    """DPO's settings."""

    name: str = "dpo"
    """Name of the algorithm."""
    loss: PairLoss = PairLoss.SIGMOID
    """The loss of a pair."""
    mixed_with: Annotated[dict[str, float], Range(above=0, maximum=1e4)] = field(default_factory=dict)
    """Further losses that are added, by name, each with its weight: {bco_pair: 0.25} for MPO's."""
    beta: Annotated[float, Range(above=0, maximum=1e4, note="at 0 the loss does not depend on the policy")] = 0.1
    """Strength with which the policy is held to the reference: rewards are beta * log(policy / reference)."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Probability that chosen and rejected are swapped. With loss=sigmoid it is cDPO."""
    discopop_temperature: Annotated[float, Range(above=0, below=1)] = DISCOPOP_TEMPERATURE
    """Temperature tau of discopop: the sharpness of the transition between its two losses."""
    f_divergence: FDivergence = FDivergence.REVERSE_KL
    """Divergence that holds the policy to the reference."""
    f_alpha: Annotated[float, Range(above=0, below=1, note="at 0 it is reverse_kl, at 1 forward_kl")] = F_ALPHA
    """Parameter alpha of f_divergence=alpha."""
    ld_alpha: Annotated[float, Range(0, 1)] = 1.0
    """Weight of a token beyond the length of the pair's shorter response (LD-DPO, arXiv 2409.06411), for policy and
    reference alike, so that length earns less. 1 counts all tokens alike, 0 drops the rest of the longer response."""
    wpo: bool = False
    """Whether to multiply each pair's loss by the probability of its two responses under the policy, per token and
    relative to the policy's own choices, without gradient (WPO, arXiv 2406.11827). Pairs that the policy would never
    produce then count less."""
    rpo_alpha: Annotated[float, Range(0, 1e4)] = 0.0
    """Weight of the chosen response's negative log-likelihood per token. 0 disables it. Without it chosen responses can
    become less likely, as long as rejected ones become so faster (arXiv 2410.08847): watch train/chosen_reward."""
    likelihood_mean: LikelihoodMean = LikelihoodMean.PAIRS
    """Unit over which rpo_alpha's likelihood is averaged."""
    reference: ReferenceSource = ReferenceSource.LIVE
    """Whether the reference's logprobs are computed in each step, or all of them before training."""
    reference_update: ReferenceUpdateConfig = field(default_factory=ReferenceUpdateConfig)
    """Rule by which the reference follows the policy (TR-DPO)."""

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_mixture()
        self._check_smoothing()
        self._check_divergence()
        if self.discopop_temperature != DISCOPOP_TEMPERATURE and PairLoss.DISCOPOP not in self.losses:
            raise SettingError(
                "discopop_temperature",
                "has no effect without discopop",
                got=self.discopop_temperature,
                hint="remove it",
            )
        if not self.rpo_alpha and self.likelihood_mean is not LikelihoodMean.PAIRS:
            raise SettingError(
                "likelihood_mean", "has no effect with rpo_alpha=0", got=self.likelihood_mean, hint="remove it"
            )
        if self.reference is ReferenceSource.PRECOMPUTED:
            self.reference_update.check_live()

    def _check_mixture(self) -> None:
        known = [str(loss) for loss in PairLoss]
        for name in self.mixed_with:
            if name not in known or name == self.loss:
                raise SettingError("mixed_with", f"must name losses of {', '.join(known)} besides loss", got=repr(name))
        if len([loss for loss in preference.SORTING if loss in self.losses]) > 1:
            raise SettingError(
                "mixed_with", "must not combine aot and aot_unpaired", why="they sort the pairs of a step differently"
            )

    def _check_divergence(self) -> None:
        if self.f_divergence is not FDivergence.REVERSE_KL and all(loss in preference.UNSCORED for loss in self.losses):
            raise SettingError(
                "f_divergence",
                f"has no effect with loss={self.loss}",
                got=self.f_divergence,
                hint="remove it, or use another loss, such as sigmoid",
            )
        if self.f_alpha != F_ALPHA and self.f_divergence is not FDivergence.ALPHA:
            raise SettingError(
                "f_alpha", "has no effect without f_divergence=alpha", got=self.f_alpha, hint="remove it"
            )

    def _check_smoothing(self) -> None:
        smoothed = [loss for loss in self.losses if loss in preference.SMOOTHED]
        if self.label_smoothing and not smoothed:
            raise SettingError(
                "label_smoothing",
                f"has no effect with loss={self.loss}",
                got=self.label_smoothing,
                hint=f"remove it, or use one of {', '.join(preference.SMOOTHED)}",
            )
        needing = [loss for loss in self.losses if loss in (PairLoss.ROBUST, PairLoss.EXO_PAIR)]
        if needing and not self.label_smoothing:
            instead = "is sigmoid" if needing[0] is PairLoss.ROBUST else "is infinite"
            key = "loss" if needing[0] is self.loss else "mixed_with"
            raise SettingError(
                "label_smoothing", f"must be above 0 with {key}={needing[0]}, which at 0 {instead}", got="0.0"
            )

    @property
    def losses(self) -> dict[PairLoss, float]:
        """Each loss with its weight."""
        return {self.loss: 1.0} | {PairLoss(name): weight for name, weight in self.mixed_with.items()}


class Dpo(OfflineAlgorithm):
    """The mean over pairs of a loss of the policy's movement from the reference on either response."""

    data = "preferences"

    def __init__(self, config: DpoConfig):
        self.config = config
        self.needs_reference = config.reference is ReferenceSource.LIVE
        self.precomputes_reference = not self.needs_reference
        self.reference_update = config.reference_update
        self.output = Output.TOKENS_WITH_RENYI_ENTROPY if config.wpo else Output.TOKENS
        self.sorting = next((loss for loss in config.losses if loss in preference.SORTING), None)

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """Returns [T] 1 / pairs of the step."""
        return preference.pair_token_weights(batch)

    def prepare(self, batch: Preferences, model: ForwardModel) -> Preferences:
        """Returns the batch with the reference's logprobs, the weight of the chosen responses' likelihood if it has
        any, and for aot the counterparts of each sequence among the step's other pairs."""
        config, reference = self.config, model.logprobs(batch, reference=True)
        batch = replace(batch, reference_logprobs=reference)
        batch = preference.with_likelihood(batch, config.rpo_alpha, config.likelihood_mean)
        if self.sorting is None:
            return batch
        # Computed with the same weights as the loss: offline, every batch is one optimizer step.
        policy, frozen = (pairs(self._sums(each, batch), batch) for each in (model.logprobs(batch), reference))
        if self.sorting is PairLoss.AOT:
            chosen = rejected = preference.matched_margins(policy[0] - policy[1], frozen[0] - frozen[1])
        else:
            chosen, rejected = preference.matched_ratios(policy[0] - frozen[0], policy[1] - frozen[1])
        return replace(batch, matched=preference.from_pairs(chosen, rejected, batch))

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over pairs of weight * losses of the family, and rpo_alpha * negative log-likelihood per
        chosen token."""
        assert batch.reference_logprobs is not None
        config = self.config
        ratios = self._sums(policy.logprobs, batch) - self._sums(batch.reference_logprobs, batch)
        settings = PairSettings(
            beta=config.beta, label_smoothing=config.label_smoothing, temperature=config.discopop_temperature
        )
        of_pairs = self._of_pairs(ratios, batch)
        of_pair = sum(
            weight * preference.PAIR_LOSSES[name](of_pairs, settings) for name, weight in config.losses.items()
        )
        if config.wpo:
            of_pair = of_pair * preference.on_policy_weights(policy, batch)
        loss = (preference.pair_weights(weights, batch) * of_pair).sum()
        logprobs = sequence_sums(policy.logprobs, batch)
        metrics = preference.pair_metrics(config.beta * ratios, logprobs, weights, batch)
        if config.rpo_alpha:
            nll, metrics["train/nll_nats"] = preference.likelihood(logprobs, batch, config.likelihood_mean)
            loss = loss + config.rpo_alpha * nll
        metrics["train/loss"] = Sum(loss.detach())
        metrics["train/entropy_nats"] = masked_mean(policy.entropy, batch.loss_mask)
        return LossOutput(loss=loss, metrics=metrics)

    def _sums(self, logprobs: Float[Tensor, " T"], batch: Preferences) -> Float[Tensor, " R"]:
        """Returns [R] the sum over each response's tokens, weighted by ld_alpha."""
        if self.config.ld_alpha < 1:
            logprobs = logprobs * preference.length_discounts(batch, self.config.ld_alpha)
        return sequence_sums(logprobs, batch)

    def _of_pairs(self, ratios: Float[Tensor, " R"], batch: Preferences) -> LogRatios:
        """Returns the inputs of the family's losses."""
        chosen, rejected = pairs(ratios, batch)
        chosen_tokens, rejected_tokens = pairs(preference.response_tokens(batch), batch)
        chosen_matched, rejected_matched = (None, None) if batch.matched is None else pairs(batch.matched, batch)
        return LogRatios(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            chosen_matched=chosen_matched,
            rejected_matched=rejected_matched,
            divergence=self.config.f_divergence,
            alpha=self.config.f_alpha,
        )


COMPONENT, CONFIG = Dpo, DpoConfig
