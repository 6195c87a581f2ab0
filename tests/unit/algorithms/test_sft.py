"""Supervised fine-tuning against a loss worked by hand, and what its config refuses."""

import pytest
import torch

from rlframe.algorithms.sft import Sft, SftConfig
from rlframe.ops.aggregation import Aggregation
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean, PolicyOutput, Sum

BATCH = Sequences(
    token_ids=torch.arange(5),
    lengths=torch.tensor([2, 3]),
    loss_mask=torch.tensor([False, True, False, True, True]),
)
POLICY = PolicyOutput(
    logprobs=torch.tensor([-9.0, -1.0, -9.0, -2.0, -6.0]), entropy=torch.tensor([9.0, 1.0, 9.0, 2.0, 4.5])
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Aggregation.TOKEN_MEAN, 9 / 3),
        (Aggregation.TOKEN_SUM, 9.0),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, (1 + 8) / 2),
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, (1 / 1 + 8 / 2) / 2),
    ],
)
def test_the_loss_is_the_negative_log_likelihood_aggregated(mode: Aggregation, expected: float) -> None:
    algorithm = Sft(SftConfig(aggregation=mode))
    result = algorithm.loss(POLICY, BATCH, algorithm.token_weights(BATCH))
    assert float(result.loss) == pytest.approx(expected)
    assert result.metrics == {
        "train/loss": Sum(pytest.approx(expected)),  # type: ignore[arg-type]
        "train/nll_nats": Mean(9.0, 3.0),
        "train/entropy_nats": Mean(7.5, 3.0),
    }


@pytest.mark.parametrize("mode", [Aggregation.PROMPT_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM])
def test_aggregations_over_rollouts_are_refused(mode: Aggregation) -> None:
    with pytest.raises(ValueError, match=f"aggregation {mode} is for rollouts, not for sft; use token_mean"):
        SftConfig(aggregation=mode)
