"""Reward model, classification and reranker against losses worked by hand, and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.base import ForwardModel
from rlframe.algorithms.classification import Classification, ClassificationConfig
from rlframe.algorithms.reranker import Reranker, RerankerConfig, RerankerLoss
from rlframe.algorithms.reward_model import RewardModel, RewardModelConfig
from rlframe.ops.comparisons.ranking import first_relevant_ranks, list_log_softmax
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Mean, ValueOutput
from rlframe.types.supervised import Labelled, Preferences
from rlframe.utils.errors import DataError


def at_last(scores: list[list[float]], lengths: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """[T, C] values that are 9 but at the last tokens, and the fields of such sequences; only last tokens count."""
    last = torch.tensor(lengths).cumsum(0) - 1
    values = torch.full((sum(lengths), len(scores[0])), 9.0)
    values[last] = torch.tensor(scores)
    mask = torch.zeros(sum(lengths), dtype=torch.bool)
    mask[last] = True
    tokens = torch.arange(sum(lengths))
    return values.requires_grad_(), {"token_ids": tokens, "lengths": torch.tensor(lengths), "loss_mask": mask}


def outcome(algorithm: Any, values: Tensor, batch: Sequences) -> LossOutput:
    """The loss, with its gradient in `values.grad`."""
    result = algorithm.loss(ValueOutput(values=values), batch, algorithm.token_weights(batch))
    result.loss.backward()
    return replace(result, loss=result.loss.detach())


# Two pairs, the rejected one of B first: A 2 over 0.5, B -1 over 1.
PAIRS = {
    "pair": torch.tensor([8, 4, 4, 8]),
    "chosen": torch.tensor([False, True, False, True]),
    "margin": torch.tensor([0.0, 0.5, 0.5, 0.0]),
}
SCORES = [[1.0], [2.0], [0.5], [-1.0]]


@pytest.mark.parametrize(
    ("settings", "loss", "slope"),
    [
        # A: log(1 + e^-1.5) = 0.201413, slope at r_c -sigmoid(-1.5) = -0.182426; B: log(1 + e^2) = 2.126928.
        ({"centring": 0.0}, (0.201413 + 2.126928) / 2, -0.182426 / 2),
        # A: + 0.01 * (2 + 0.5)^2 = 0.0625, slope + 0.02 * 2.5; B: -1 + 1 = 0.
        ({}, (0.263913 + 2.126928) / 2, (-0.182426 + 0.05) / 2),
        # A's margin is 2 * 0.5: log(1 + e^-0.5) = 0.474077, slope -sigmoid(-0.5) = -0.377541; B has none.
        ({"centring": 0.0, "margin_scale": 2.0}, (0.474077 + 2.126928) / 2, -0.377541 / 2),
    ],
)
def test_the_reward_model_is_bradley_terry_with_margin_and_centring(
    settings: dict[str, float], loss: float, slope: float
) -> None:
    values, fields = at_last(SCORES, [3, 1, 2, 4])
    result = outcome(RewardModel(RewardModelConfig(**settings)), values, Preferences(**fields, **PAIRS))
    assert float(result.loss) == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None and float(values.grad[3, 0]) == pytest.approx(slope, abs=1e-6)
    # Places 2, 3, 5 and 9 are the last tokens.
    assert values.grad[:, 0].nonzero()[:, 0].tolist() == [2, 3, 5, 9]
    assert result.metrics["train/accuracy"] == Mean(1.0, 2.0)
    assert result.metrics["train/reward_margin"] == Mean(1.5 - 2.0, 2.0)


def test_log_exp_is_the_same_loss() -> None:
    values, fields = at_last(SCORES, [3, 1, 2, 4])
    result = outcome(RewardModel(RewardModelConfig(centring=0.0)), values, Preferences(**fields, **PAIRS))
    log_exp = (torch.tensor([0.5 - 2.0, 1.0 + 1.0]).exp() + 1).log().mean()
    assert float(result.loss) == pytest.approx(float(log_exp), abs=1e-6)


def test_a_response_that_does_not_count_takes_its_pair_along() -> None:
    values, fields = at_last(SCORES, [3, 1, 2, 4])
    fields["loss_mask"][5] = False
    result = outcome(RewardModel(RewardModelConfig(centring=0.0)), values, Preferences(**fields, **PAIRS))
    # B alone, over the two pairs of the step.
    assert float(result.loss) == pytest.approx(2.126928 / 2, abs=1e-6)
    assert result.metrics["train/accuracy"] == Mean(0.0, 1.0)


def test_margins_that_no_pair_states_are_told() -> None:
    _, fields = at_last(SCORES, [3, 1, 2, 4])
    stated = Preferences(**fields, **PAIRS)
    none = Preferences(**fields, **PAIRS | {"margin": torch.zeros(4)})
    scaled = RewardModel(RewardModelConfig(margin_scale=2.0))
    told = scaled.warning([none, none])
    assert told is not None and told.startswith("algorithm.margin_scale=2.0 has no effect, as no pair states a margin")
    assert scaled.warning([none, stated]) is None
    assert RewardModel(RewardModelConfig()).warning([none]) is None


def labelled(scores: list[list[float]], label: list[float], group: list[int]) -> tuple[Tensor, Labelled]:
    """One sequence of two tokens for each row of scores."""
    values, fields = at_last(scores, [2] * len(scores))
    return values, Labelled(**fields, label=torch.tensor(label), group=torch.tensor(group))


def test_classification_is_cross_entropy_at_the_last_token() -> None:
    # log(e + 1 + e^2) - 2 = 2.407606 - 2; log 3 = 1.098612, where the first of three equal classes is chosen wrongly.
    values, batch = labelled([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]], [2.0, 1.0], [0, 1])
    result = outcome(Classification(ClassificationConfig(num_classes=3)), values, batch)
    assert float(result.loss) == pytest.approx((0.407606 + 1.098612) / 2, abs=1e-6)
    assert result.metrics["train/accuracy"] == Mean(1.0, 2.0)
    # softmax minus one at the label, over two sequences: (e^2 / 11.107338 - 1) / 2.
    assert values.grad is not None and float(values.grad[1, 2]) == pytest.approx(-0.167380, abs=1e-6)
    assert not values.grad[0].any()


# Query 7: scores 1, 0.5, -2 of which the first is relevant; query 3: 0 of label 1 and 1 of label 3. Not in order.
LISTS = ([[0.5], [0.0], [1.0], [1.0], [-2.0]], [0.0, 1.0, 1.0, 3.0, 0.0], [7, 3, 7, 3, 7])


def test_the_listwise_reranker_sets_the_documents_of_a_query_against_each_other() -> None:
    # log(e + e^0.5 + e^-2) - 1 = 1.504597 - 1; log(1 + e) = 1.313262: 1/4 of 1.313262 and 3/4 of 0.313262 = 0.563262.
    values, batch = labelled(*LISTS)
    result = outcome(Reranker(RerankerConfig()), values, batch)
    assert float(result.loss) == pytest.approx((0.504597 + 0.563262) / 2, abs=1e-6)
    assert result.metrics["train/accuracy"] == Mean(2.0, 2.0)


def test_temperature_and_smallest_list_of_the_listwise_reranker() -> None:
    # Scores twice as large: log(e^2 + e + e^-4) - 2 = 0.315072; log(1 + e^2) = 2.126928, of which 3/4 less 2.
    values, batch = labelled(*LISTS)
    result = outcome(Reranker(RerankerConfig(temperature=0.5)), values, batch)
    assert float(result.loss) == pytest.approx((0.315072 + 0.626928) / 2, abs=1e-6)
    # Query 3 has two documents: neither it nor its place in the denominator is left.
    values, batch = labelled(*LISTS)
    result = outcome(Reranker(RerankerConfig(min_documents=3)), values, batch)
    assert float(result.loss) == pytest.approx(0.504597, abs=1e-6)
    assert values.grad is not None and values.grad[:, 0].nonzero()[:, 0].tolist() == [1, 5, 9]
    assert result.metrics["train/accuracy"] == result.metrics["train/reciprocal_rank"] == Mean(1.0, 1.0)


def test_queries_that_a_listwise_loss_learns_nothing_from_are_counted() -> None:
    # Query 7 has a relevant document among two, 3 has one document, 5 none that is relevant.
    _, batch = labelled([[0.0]] * 5, [0.0, 1.0, 1.0, 0.0, 0.0], [7, 3, 7, 5, 5])
    warning = Reranker(RerankerConfig()).warning([batch, batch])
    assert warning is not None and warning.startswith("4 of 6 queries have a single document, or none with a label")
    assert Reranker(RerankerConfig(loss=RerankerLoss.POINTWISE)).warning([batch]) is None
    assert Reranker(RerankerConfig()).warning([labelled(*LISTS)[1]]) is None


def test_the_pointwise_reranker_judges_each_document_by_itself() -> None:
    # log(1 + e^0.5) = 0.974077, log(1 + e^-1) = 0.313262, log(1 + e^-2) = 0.126928, log 2 = 0.693147.
    values, batch = labelled([[0.5], [1.0], [-2.0], [0.0]], [0.0, 1.0, 0.0, 1.0], [7, 7, 7, 3])
    result = outcome(Reranker(RerankerConfig(loss=RerankerLoss.POINTWISE)), values, batch)
    assert float(result.loss) == pytest.approx((0.974077 + 0.313262 + 0.126928 + 0.693147) / 4, abs=1e-6)
    # A score above 0 calls a document relevant: wrong of the first, and of the last, which is not above it.
    assert result.metrics["train/document_accuracy"] == Mean(2.0, 4.0)
    # Ranks take the same documents for right ones: of query 7 that of 0.9, which is the last of three.
    values, batch = labelled([[-2.0], [1.0], [2.0], [0.0]], [0.9, 0.5, 0.1, 0.5], [7, 7, 7, 3])
    result = outcome(Reranker(RerankerConfig(loss=RerankerLoss.POINTWISE)), values, batch)
    assert result.metrics["train/accuracy"] == Mean(0.0, 1.0)
    assert result.metrics["train/reciprocal_rank"] == Mean(pytest.approx(1 / 3), 1.0)


def test_documents_that_do_not_count_are_in_no_list() -> None:
    values, batch = labelled(*LISTS)
    batch.loss_mask[[1, 3]] = False
    batch.loss_mask[5] = False
    result = outcome(Reranker(RerankerConfig()), values, batch)
    # Query 7 has lost its relevant document and says nothing; query 3 has lost the first of its two.
    assert float(result.loss) == pytest.approx(0.0) and result.metrics["train/accuracy"] == Mean(1.0, 1.0)
    assert values.grad is not None and not values.grad.isnan().any()


def test_ranks_count_what_is_level_before_the_relevant_document() -> None:
    scores, relevant = torch.tensor([1.0, 2.0, 2.0, 0.0, 5.0]), torch.tensor([False, True, False, True, False])
    # Group 4: 2.0 of the relevant one, with a rival level; group 9 has no relevant document.
    assert first_relevant_ranks(scores, relevant, torch.tensor([4, 4, 4, 4, 9])).tolist() == [2]


def test_a_list_may_have_large_scores() -> None:
    found = list_log_softmax(torch.tensor([1000.0, 3.0, 1000.0, 3.0]), torch.tensor([1, 5, 1, 5]))
    torch.testing.assert_close(found, torch.full((4,), -0.693147))


class Silent(ForwardModel):
    """Nothing is asked of it."""


@pytest.mark.parametrize(
    ("algorithm", "label", "message"),
    [
        (Classification(ClassificationConfig()), 2.0, "a label is 2, .*num_classes=2 .* from 0 to 1"),
        (Classification(ClassificationConfig()), 0.5, "a label is 0.5"),
        (Reranker(RerankerConfig()), -1.0, "a label is -1; algorithm.loss=listwise needs labels from 0 on"),
        (Reranker(RerankerConfig(loss=RerankerLoss.POINTWISE)), 2.0, "from 0 to 1, or use loss=listwise"),
    ],
)
def test_labels_that_do_not_fit_are_refused(algorithm: Any, label: float, message: str) -> None:
    _, batch = labelled([[0.0, 0.0]], [label], [0])
    with pytest.raises(DataError, match=message):
        algorithm.prepare(batch, Silent())


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (RewardModelConfig, {"centring": -0.1}, "centring must be at least 0, got -0.1"),
        (RewardModelConfig, {"margin_scale": -1.0}, "margin_scale must be at least 0"),
        (RewardModelConfig, {"centring": float("inf")}, "centring must be at most 10000.0, got inf"),
        (RewardModelConfig, {"margin_scale": float("nan")}, "margin_scale must be at least 0, got nan"),
        (ClassificationConfig, {"num_classes": 1}, "num_classes must be at least 2, got 1"),
        (RerankerConfig, {"temperature": float("nan")}, "temperature must be above 0, got nan"),
        (RerankerConfig, {"min_documents": 0}, "min_documents must be at least 1, got 0"),
        (
            RerankerConfig,
            {"loss": RerankerLoss.POINTWISE, "min_documents": 2},
            "min_documents has no effect with loss=pointwise, got 2",
        ),
    ],
)
def test_settings_out_of_range_are_refused(config: Any, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)
