"""Supervised fine-tuning against a loss worked by hand, and what its config refuses."""

import pytest
import torch

from rlframe.algorithms.sft import Imitated, Sft, SftConfig
from rlframe.ops.aggregation import Aggregation
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean, MeanIfAny, PolicyOutput, Sum, merge
from rlframe.types.supervised import Examples
from tests.waits import Waits

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


EXAMPLES = Examples(
    token_ids=torch.arange(5),
    lengths=torch.tensor([2, 3]),
    loss_mask=torch.tensor([False, True, False, True, True]),
    importance=torch.tensor([0.0, 0.25, 0.0, 0.5, 0.5]),
    channel=torch.tensor([1, 0]),
    channels=("chat", "code"),
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # (0.25 * 1 + 0.5 * 2 + 0.5 * 6) / (0.25 + 0.5 + 0.5): a mean of tokens that count as less than one each
        (Aggregation.TOKEN_MEAN, 4.25 / 1.25),
        (Aggregation.TOKEN_SUM, 4.25),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, 4.25 / 2),
        # ((0.25 * 1) / 0.25 + (0.5 * 2 + 0.5 * 6) / 1.0) / 2
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, (1 + 4) / 2),
    ],
)
def test_tokens_count_by_their_importance(mode: Aggregation, expected: float) -> None:
    algorithm = Sft(SftConfig(aggregation=mode))
    result = algorithm.loss(POLICY, EXAMPLES, algorithm.token_weights(EXAMPLES))
    assert float(result.loss) == pytest.approx(expected)


def test_each_channel_has_its_own_metric_and_all_are_trained_together() -> None:
    algorithm = Sft(SftConfig())
    weights = algorithm.token_weights(EXAMPLES)
    with Waits() as waits:
        metrics = algorithm.loss(POLICY, EXAMPLES, weights).metrics
    assert waits.found == []
    # The second sequence, of tokens 2 and 6, is chat; the first, of 1, is code.
    assert metrics["train/nll_nats/chat"] == MeanIfAny(8.0, 2.0)
    assert metrics["train/nll_nats/code"] == MeanIfAny(1.0, 1.0)
    assert metrics["train/nll_nats"] == Mean(9.0, 3.0)
    part = EXAMPLES.select([1])
    # A step without a sequence of a channel has no mean to report for it, and 0.0 would be a perfect one.
    result = algorithm.loss(
        PolicyOutput(logprobs=POLICY.logprobs[2:], entropy=POLICY.entropy[2:]), part, algorithm.token_weights(part)
    )
    assert "train/nll_nats/code" in result.metrics
    left = {"train/loss", "train/nll_nats", "train/entropy_nats", "train/nll_nats/chat"}
    assert merge([result.metrics]).keys() == left
    # With a micro-batch that has some, it counts.
    assert merge([result.metrics, metrics])["train/nll_nats/code"] == MeanIfAny(1.0, 1.0)


def test_dft_weighs_each_token_by_its_probability_without_a_gradient_through_it() -> None:
    algorithm = Sft(SftConfig(dft=True))
    logprobs = torch.tensor([-9.0, -1.0, -9.0, -2.0, -6.0], requires_grad=True)
    result = algorithm.loss(
        PolicyOutput(logprobs=logprobs, entropy=POLICY.entropy), BATCH, algorithm.token_weights(BATCH)
    )
    # (e^-1 * 1 + e^-2 * 2 + e^-6 * 6) / 3 = (0.36788 + 0.27067 + 0.01487) / 3
    assert float(result.loss.detach()) == pytest.approx(0.653423 / 3, abs=1e-6)
    result.loss.backward()
    # d/dx of -sg(e^x) x is -e^x; with gradient through the weight it would be -e^x (1 + x), 0 for the token at -1.
    expected = [0.0, -0.367879 / 3, 0.0, -0.135335 / 3, -0.002479 / 3]
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)
    assert result.metrics["train/nll_nats"] == Mean(9.0, 3.0)


def test_pretraining_is_sft_on_texts() -> None:
    assert Sft(SftConfig(data=Imitated.TEXTS)).data == "texts" and Sft(SftConfig()).data == "examples"
