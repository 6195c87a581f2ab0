"""Group sequence policy optimization.

Source: Zheng et al. 2025, arXiv 2507.18071: GRPO's advantages with one importance ratio for a rollout, the geometric
mean of its tokens' ratios, clipped as one. It is the token form of section 4.3 (GSPO-token), s_it = sg[s_i] * pi_t /
sg[pi_t], as in verl and in ms-swift's `sequence_token`: equations 5 to 7 wherever all tokens of a rollout share one
advantage, and where they do not (a teacher's credit, weights and masks by token) each token has the gradient of its
own. TRL's `importance_sampling_level=sequence` spreads those over the rollout. Tokens that the correction's masks
reject are left out of the ratio too, as in verl. The mean log-ratio is clamped to +-20 nats, verl's to 10 above only,
TRL's not. The KL with k3_weighted takes the token's ratio (arXiv 2512.02556, equation 7), TRL's the rollout's.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import (
    ClipHigh,
    ClipLow,
    ClippedConfig,
    GroupNormalized,
    PolicyGradient,
    check_groups,
)
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.surrogate import clipped_surrogate, masked_mean, sequence_ratios
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric


@dataclass(kw_only=True, slots=True)
class GspoConfig(GroupNormalized, ClippedConfig):
    """GSPO's settings."""

    name: str = "gspo"
    """Name of the algorithm."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    """Rule by which token losses become one number. The paper's is the default; others weigh rollouts by their
    length."""
    clip_low: ClipLow = 3e-4
    """Lower bound of the rollout's ratio is 1 - clip_low. The ratio is a mean over tokens, and so close to 1."""
    clip_high: ClipHigh = 4e-4
    """Upper bound of the rollout's ratio is 1 + clip_high."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        check_groups(self)


class Gspo(PolicyGradient[GspoConfig]):
    """Clipped policy gradient with the importance ratio of whole rollouts."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] PPO's surrogate of the rollout's ratio, on each of its tokens."""
        config = self.config
        log_ratio = sequence_ratios(logprobs, old_logprobs, batch)
        token_loss, clipped = clipped_surrogate(
            log_ratio,
            torch.zeros_like(log_ratio),
            batch.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            ratio_cap=config.ratio_cap,
        )
        return token_loss, {"train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask)}


COMPONENT, CONFIG = Gspo, GspoConfig
