"""Reward models: score a response, trained on preferences between two responses.

Source: Bradley and Terry 1952; for language models Ouyang et al. 2022, arXiv 2203.02155, equation 1. What OpenRLHF
calls LogExp, log(1 + e^{r_r - r_c}), is the same loss. The margin is that of Llama 2, arXiv 2307.09288, equation 2;
centring that of Eisenstein et al. 2023, arXiv 2312.09244, section 3; it is on by default here, and off in TRL
(`center_rewards_coefficient`) and ms-swift.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from rlframe.algorithms.base import OfflineAlgorithm
from rlframe.ops.comparisons.preference import pair_token_weights, pairs
from rlframe.ops.sequences import last_outputs, sequence_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, Output, Sum, ValueOutput
from rlframe.types.supervised import Preferences
from rlframe.utils.bounds import Range, check_bounds


@dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    """A reward model's settings."""

    name: str = "reward_model"
    """Name of the algorithm."""
    margin_scale: Annotated[float, Range(0, 1e4)] = 0.0
    """Factor of the margin that the data states, by which the chosen response must score higher. 0 disables it."""
    centring: Annotated[float, Range(0, 1e4)] = 0.01
    """Weight of (r_c + r_r)^2, which keeps scores around zero; the other loss depends on differences only. 0 disables
    it."""

    def __post_init__(self) -> None:
        check_bounds(self)


class RewardModel(OfflineAlgorithm):
    """The output of a head of one output at the last token is the score of a sequence."""

    data = "preferences"
    output = Output.VALUES

    def __init__(self, config: RewardModelConfig):
        self.config = config

    def warning(self, batches: Iterable[Preferences]) -> str | None:
        """Returns a warning if margins are asked for and no pair states one."""
        if not self.config.margin_scale or any(bool(batch.margin.any()) for batch in batches):
            return None
        return (
            f"algorithm.margin_scale={self.config.margin_scale} has no effect, as no pair states a margin: name it "
            "'margin', or its two sides 'score_chosen' and 'score_rejected', or set margin_scale=0"
        )

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """Returns [T] 1 / pairs of the step."""
        return pair_token_weights(batch)

    def loss(self, policy: ValueOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over pairs of weight * [-log sigmoid(r_c - r_r - margin) + centring * (r_c + r_r)^2]."""
        config = self.config
        chosen, rejected = pairs(last_outputs(policy.values, batch)[:, 0], batch)
        margin, _ = pairs(config.margin_scale * batch.margin, batch)
        # softplus(-x) is -log sigmoid(x).
        of_pair = softplus(margin - (chosen - rejected)) + config.centring * (chosen + rejected).square()
        # A response without a token in the loss has no score.
        weight = torch.minimum(*pairs(sequence_weights(weights, batch), batch))
        loss = (weight * of_pair).sum()
        counted, chosen, rejected = weight > 0, chosen.detach(), rejected.detach()
        return LossOutput(
            loss=loss,
            metrics={
                "train/loss": Sum(loss.detach()),
                "train/accuracy": masked_mean((chosen > rejected).float(), counted),
                "train/reward_margin": masked_mean(chosen - rejected, counted),
                "train/chosen_reward": masked_mean(chosen, counted),
                "train/rejected_reward": masked_mean(rejected, counted),
            },
        )


COMPONENT, CONFIG = RewardModel, RewardModelConfig
