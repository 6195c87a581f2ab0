"""Simple preference optimization: rewards are mean logprobs, held apart by a margin, without a reference.

Source: Meng et al. 2024, arXiv 2405.14734, equation 6.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import OfflineAlgorithm
from rlframe.ops import preference
from rlframe.ops.preference import pairs
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, PolicyOutput, Sum
from rlframe.types.supervised import Preferences


@dataclass(kw_only=True, slots=True)
class SimpoConfig:
    """SimPO's settings."""

    name: str = "simpo"
    """The algorithm."""
    beta: float = 2.0
    """Scale of the rewards: beta * mean logprob of a response's tokens. The paper's lie between 2 and 2.5."""
    gamma: float = 1.0
    """By how much the chosen reward is to be above the rejected one. The paper's lie between 0.3 and 1.6."""
    label_smoothing: float = 0.0
    """Probability that chosen and rejected are the wrong way round."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta must be above 0, got {self.beta}: at 0 the loss does not depend on the policy")
        if self.gamma < 0:
            raise ValueError(f"gamma must be at least 0, got {self.gamma}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}")


class Simpo(OfflineAlgorithm):
    """Cross-entropy of the sign of the margin between two mean logprobs."""

    data = "preferences"

    def __init__(self, config: SimpoConfig):
        self.config = config

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """[T] 1 / pairs of the step."""
        return preference.pair_token_weights(batch)

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """sum over pairs of weight * -log sigmoid(chosen reward - rejected reward - gamma)."""
        config = self.config
        logprobs = sequence_sums(policy.logprobs, batch)
        rewards = config.beta * logprobs / preference.response_tokens(batch)
        chosen, rejected = pairs(rewards, batch)
        of_pair = preference.smoothed(chosen - rejected - config.gamma, config.label_smoothing)
        loss = (preference.pair_weights(weights, batch) * of_pair).sum()
        metrics = preference.pair_metrics(rewards, logprobs, weights, batch) | {
            "train/loss": Sum(float(loss.detach())),
            "train/entropy_nats": masked_mean(policy.entropy, batch.loss_mask),
        }
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Simpo, SimpoConfig
