"""Group relative policy optimization.

Source: Shao et al. 2024, arXiv 2402.03300, equation 3, with: separate clip bounds (DAPO, arXiv 2503.14476), a choice of
normalisation (Dr.GRPO, arXiv 2503.20783; GDPO, arXiv 2601.05242), and the aggregation named in the config. The paper's
own form is `aggregation: seq_mean_token_mean`, `kl_coefficient: 0.04`, `kl_estimator: k3`. Dr.GRPO is
`normalize_by: none` with `aggregation: seq_mean_token_sum_norm` (configs/algorithm/dr_grpo.yaml).
"""

from dataclasses import dataclass

from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient, GroupNormalized, check_groups


@dataclass(kw_only=True, slots=True)
class GrpoConfig(GroupNormalized, ClippedConfig):
    """GRPO's settings."""

    name: str = "grpo"
    """Name of the algorithm."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        check_groups(self)


class Grpo(ClippedPolicyGradient[GrpoConfig]):
    """Clipped policy gradient with the group's mean reward as baseline."""


COMPONENT, CONFIG = Grpo, GrpoConfig
