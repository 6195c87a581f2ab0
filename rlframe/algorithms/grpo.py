"""Group relative policy optimization.

Source: Shao et al. 2024, arXiv 2402.03300, equation 3, with: separate clip bounds (DAPO, arXiv 2503.14476), group
normalisation optional (Dr.GRPO, arXiv 2503.20783), and the aggregation named in the config. The paper's own form is
`aggregation: seq_mean_token_mean`, `kl_coefficient: 0.04`, `kl_estimator: k3`. Dr.GRPO is `normalize_by_std: false`
with `aggregation: seq_mean_token_sum_norm` (configs/algorithm/dr_grpo.yaml).
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient, on_tokens
from rlframe.ops.advantages import group_advantages
from rlframe.types.batch import Batch


@dataclass(kw_only=True, slots=True)
class GrpoConfig(ClippedConfig):
    """GRPO's settings."""

    name: str = "grpo"
    """The algorithm."""
    normalize_by_std: bool = True
    """Divide centred rewards by their group's standard deviation."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        self.needs_groups()


class Grpo(ClippedPolicyGradient[GrpoConfig]):
    """Clipped policy gradient with the group's mean reward as baseline."""

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] the rollout's group advantage on each of its sampled tokens."""
        return on_tokens(group_advantages(batch.rewards, batch.group, normalize=self.config.normalize_by_std), batch)


COMPONENT, CONFIG = Grpo, GrpoConfig
