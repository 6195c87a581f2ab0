"""KTO against a loss worked by hand, its estimate of the KL, and what it says and refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.base import ForwardModel
from rlframe.algorithms.kto import Kto, KtoConfig, KtoLoss
from rlframe.ops.comparisons.preference import mismatched
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean, MeanIfAny, PolicyOutput, Sum, merge
from rlframe.types.supervised import Unpaired

# Prompts 1 2, 3 and 4 5 with the responses 6 7, 8 9 and 10.
BATCH = Unpaired(
    token_ids=torch.tensor([1, 2, 6, 7, 3, 8, 9, 4, 5, 10]),
    lengths=torch.tensor([4, 3, 3]),
    loss_mask=torch.tensor([0, 0, 1, 1, 0, 1, 1, 0, 0, 1]).bool(),
    desirable=torch.tensor([True, False, True]),
    kl_nats=torch.zeros(3),
)
TENTHS = BATCH.token_ids / 10


class ByToken(ForwardModel):
    """A ForwardModel whose log-ratio of a token is a tenth of its number, times `sign`."""

    def __init__(self, sign: float = 1.0):
        self.sign = sign
        self.asked: list[tuple[list[int], bool]] = []

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Tensor:
        """[T] nats."""
        self.asked.append((batch.token_ids.tolist(), reference))
        tenths = batch.token_ids / 10
        return -2 * tenths if reference else -2 * tenths + self.sign * tenths


def outcome(algorithm: Kto, batch: Unpaired, logprobs: Tensor = TENTHS - 2) -> Any:
    """The loss of a batch whose log-ratios are TENTHS."""
    batch = replace(batch, reference_logprobs=torch.full((10,), -2.0))
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.ones(10))
    return algorithm.loss(policy, batch, algorithm.token_weights(batch))


def test_kto() -> None:
    # Log-ratios of the responses: 1.3, 1.7, 1.0. With z = 0.5 and beta 2, minus z: 1.6, 2.4, 1.0.
    algorithm = Kto(KtoConfig(beta=2.0, desirable_weight=0.5, undesirable_weight=3.0))
    result = outcome(algorithm, replace(BATCH, kl_nats=torch.full((3,), 0.5)))
    # sigmoid(-1.6) = 0.167982, sigmoid(2.4) = 0.916827, sigmoid(-1) = 0.268941:
    # (0.5 * 0.167982 + 3 * 0.916827 + 0.5 * 0.268941) / 3.
    assert result.loss.item() == pytest.approx(0.989648, abs=2e-6)
    near = {"abs": 1e-5}
    assert result.metrics == {
        "train/accuracy": Mean(2.0, 3.0),
        "train/kl_nats": Mean(1.5, 3.0),
        "train/desirable_reward": MeanIfAny(pytest.approx(4.6, **near), 2.0),
        "train/undesirable_reward": MeanIfAny(pytest.approx(3.4, **near), 1.0),
        "train/loss": Sum(result.loss.item()),
        "train/entropy_nats": Mean(5.0, 5.0),
    }


def test_apo_zero_unpaired_needs_no_estimate() -> None:
    algorithm = Kto(KtoConfig(loss=KtoLoss.APO_ZERO_UNPAIRED, beta=1.0))
    model = ByToken()
    batch = algorithm.prepare(BATCH, model)
    assert batch.kl_nats.tolist() == [0.0, 0.0, 0.0]
    assert model.asked == [(BATCH.token_ids.tolist(), True)]
    # sigmoid(-1.3) = 0.214165, sigmoid(1.7) = 0.845535, sigmoid(-1) = 0.268941.
    assert float(outcome(algorithm, batch).loss) == pytest.approx((0.214165 + 0.845535 + 0.268941) / 3, abs=2e-6)


def test_the_kl_is_the_mean_over_mismatched_responses() -> None:
    model = ByToken()
    batch = Kto(KtoConfig()).prepare(BATCH, model)
    # Each response counts once, whatever prompt it stands behind: (1.3 + 1.7 + 1.0) / 3.
    torch.testing.assert_close(batch.kl_nats, torch.full((3,), 4 / 3))
    # Reference on the batch; policy and reference on the same mismatched one.
    assert [reference for _, reference in model.asked] == [True, False, True]
    assert model.asked[1][0] == model.asked[2][0] != BATCH.token_ids.tolist()
    assert batch.reference_logprobs is not None and not batch.kl_nats.requires_grad


def test_the_kl_is_not_below_zero() -> None:
    assert Kto(KtoConfig()).prepare(BATCH, ByToken(-1.0)).kl_nats.tolist() == [0.0, 0.0, 0.0]


def test_every_prompt_meets_the_response_of_another() -> None:
    others = mismatched(BATCH)
    made = []
    for tokens, mask in zip(
        others.token_ids.split(others.lengths.tolist()), others.loss_mask.split(others.lengths.tolist()), strict=True
    ):
        made.append((tuple(tokens[~mask].tolist()), tuple(tokens[mask].tolist())))
    prompts, responses = [(1, 2), (3,), (4, 5)], [(6, 7), (8, 9), (10,)]
    assert sorted(prompt for prompt, _ in made) == prompts
    assert sorted(response for _, response in made) == responses
    assert not set(made) & set(zip(prompts, responses, strict=True))


def test_no_prompt_meets_a_response_to_itself_while_half_of_the_batch_has_others() -> None:
    # Prompts 1, 1, 2, 3, of which the first has one response twice. With one less, prompt 1 has more than half.
    rows = [(1, 7), (1, 7), (2, 8), (3, 9)]
    batch = Sequences(
        token_ids=torch.tensor(rows).flatten(),
        lengths=torch.full((4,), 2),
        loss_mask=torch.tensor([False, True] * 4),
    )
    pairs = {tuple(pair) for pair in mismatched(batch).token_ids.view(-1, 2).tolist()}
    assert not pairs & set(rows)
    fewer = [tuple(pair) for pair in mismatched(batch.select([0, 1, 2])).token_ids.view(-1, 2).tolist()]
    assert sorted(fewer) == [(1, 7), (1, 8), (2, 7)]


def test_what_a_prompt_meets_does_not_depend_on_the_order() -> None:
    one, other = mismatched(BATCH), mismatched(BATCH.select([2, 0, 1]))
    assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.lengths, other.lengths)


def test_a_mismatched_sequence_is_no_longer_than_the_longest() -> None:
    # Prompt of 5 and response of 1, prompt of 1 and response of 5: 10 tokens where 6 are known to fit.
    batch = Sequences(
        token_ids=torch.arange(12),
        lengths=torch.tensor([6, 6]),
        loss_mask=torch.tensor([0] * 5 + [1, 0] + [1] * 5).bool(),
    )
    others = mismatched(batch)
    assert sorted(others.lengths.tolist()) == [2, 6]
    assert others.token_ids.split(others.lengths.tolist())[others.lengths.tolist().index(6)].tolist() == [
        0,
        1,
        2,
        3,
        4,
        7,
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_a_step_without_one_class_is_fine(kept: bool) -> None:
    logprobs = (TENTHS - 2).requires_grad_()
    result = outcome(Kto(KtoConfig()), replace(BATCH, desirable=torch.full((3,), kept)), logprobs)
    result.loss.backward()
    assert result.loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    absent, metrics = "train/undesirable_reward" if kept else "train/desirable_reward", merge([result.metrics])
    assert absent in result.metrics and absent not in metrics and metrics["train/accuracy"].count == 3


def test_classes_out_of_balance_are_told_with_the_numbers() -> None:
    algorithm = Kto(KtoConfig(desirable_weight=1.5))
    # 1.5 * 4 desirable over 1 * 2 undesirable in two batches.
    assert algorithm.warning([BATCH, BATCH]) == (
        "algorithm.desirable_weight=1.5 * 4 desirable responses is 3 times algorithm.undesirable_weight=1.0 * 2 "
        "undesirable ones; KTO's paper recommends a ratio between 1 and 1.33"
    )
    assert Kto(KtoConfig(undesirable_weight=2.0)).warning([BATCH]) is None
    assert Kto(KtoConfig(undesirable_weight=1.5)).warning([BATCH]) is None
    only = replace(BATCH, desirable=torch.ones(3).bool())
    assert "is infinite times" in str(algorithm.warning([only]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0 .*, got 0.0"),
        ({"desirable_weight": -1.0}, "desirable_weight must be at least 0, got -1.0"),
        ({"undesirable_weight": -1.0}, "undesirable_weight must be at least 0, got -1.0"),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "desirable_weight must be above 0 if undesirable"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KtoConfig(**wrong)
