"""Group sequence policy optimization.

Source: Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7: GRPO's advantages with one importance ratio
for a rollout, the geometric mean of its tokens' ratios, clipped as one. The paper's token form (GSPO-token) has the
same value and gradient while all tokens of a rollout share one advantage, as they do here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import ClippedConfig, PolicyGradient
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.surrogate import clipped_surrogate, masked_mean, sequence_means
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric


@dataclass(kw_only=True, slots=True)
class GspoConfig(ClippedConfig):
    """GSPO's settings."""

    name: str = "gspo"
    """The algorithm."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    """How token losses become one number. The paper's is the default; others weigh rollouts by their length."""
    clip_low: float = 3e-4
    """The rollout's ratio, a mean over its tokens and so close to 1, is clipped below at 1 - this."""
    clip_high: float = 4e-4
    """The rollout's ratio is clipped above at 1 + this."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        self.needs_groups()


class Gspo(PolicyGradient[GspoConfig]):
    """Clipped policy gradient with the importance ratio of whole rollouts."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """[T] PPO's of the rollout's ratio, on each of its tokens."""
        config = self.config
        log_ratio = sequence_means(logprobs - old_logprobs, batch)
        token_loss, clipped = clipped_surrogate(
            log_ratio,
            torch.zeros_like(log_ratio),
            batch.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        return token_loss, {"train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask)}


COMPONENT, CONFIG = Gspo, GspoConfig
