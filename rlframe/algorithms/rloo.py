"""REINFORCE leave-one-out.

Source: Ahmadian et al. 2024, arXiv 2402.14740: the baseline of a rollout is the mean reward of the others of its group,
the whole rollout is one action (hence the default aggregation), and the KL to the reference, summed over its tokens, is
subtracted from the reward before the baseline. At ratio one the clipped surrogate has the paper's gradient; the clip is
for several updates per batch, and of the token's ratio, as in verl. TRL clips the whole rollout's, the product of its
tokens', which no setting gives here; with one update both have the paper's gradient.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient, check_groups, on_tokens
from rlframe.ops.advantages import EPS, deviation, leave_one_out_advantages, over_attempts
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch


@dataclass(kw_only=True, slots=True)
class RlooConfig(ClippedConfig):
    """RLOO's settings."""

    name: str = "rloo"
    """Name of the algorithm."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM
    """Rule by which token losses become one number."""
    kl_in_reward: bool = True
    """Whether the KL of the policy that sampled, summed over the rollout's tokens, is subtracted from the reward before
    the baseline. Otherwise the KL is a term of the loss."""
    kl_estimator: KlEstimator = KlEstimator.K1
    """Estimator of the KL."""
    normalize_advantages: bool = False
    """Whether the rollouts' advantages are divided by their standard deviation over the batch plus 1e-6 (TRL's option
    of that name, with 1e-4). Their mean is 0 already."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        check_groups(self)


class Rloo(ClippedPolicyGradient[RlooConfig]):
    """Policy gradient with the mean reward of the group's other rollouts as baseline."""

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] (reward - KL of the rollout) minus its mean over the group's other rollouts."""
        return on_tokens(over_attempts(self._relative, self.net_rewards(batch), batch=batch), batch)

    def _relative(self, rewards: Float[Tensor, " A"], group: Int[Tensor, " A"]) -> Float[Tensor, " A"]:
        advantages = leave_one_out_advantages(rewards, group)
        return advantages / (deviation(advantages) + EPS) if self.config.normalize_advantages else advantages


COMPONENT, CONFIG = Rloo, RlooConfig
