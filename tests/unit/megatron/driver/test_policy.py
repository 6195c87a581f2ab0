"""What the policy reports of a batch that took several optimizer steps."""

from rlframe.megatron.driver.policy import average
from rlframe.types.results import Mean, Peak, Sum


def test_means_are_pooled_peaks_the_greatest_and_sums_averaged() -> None:
    steps = [
        {"kl": Mean(6.0, 2.0), "gap_max": Peak(0.5), "loss": Sum(1.0)},
        {"kl": Mean(1.0, 5.0), "gap_max": Peak(0.2), "loss": Sum(4.0)},
    ]
    # (6 + 1) / (2 + 5), max(0.5, 0.2), (1 + 4) / 2 steps
    assert average(steps) == {"kl": 1.0, "gap_max": 0.5, "loss": 2.5}
