"""DPO's family, ORPO and SimPO against losses worked by hand, and what their configs refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.base import ForwardModel
from rlframe.algorithms.dpo import Dpo, DpoConfig
from rlframe.algorithms.orpo import Orpo, OrpoConfig
from rlframe.algorithms.simpo import Simpo, SimpoConfig
from rlframe.ops.comparisons.preference import PairLoss, from_pairs, log_odds_ratio, pairs
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Mean, PolicyOutput, Sum
from rlframe.types.supervised import Preferences

# Two pairs, each sequence a prompt of one token and its response, B before A and the rejected one first:
#   A: chosen -1 -3, reference -2 -4: r(c) = 2; rejected -6, reference -5: r(r) = -1; D = 3, D' = 2/2 + 1 = 2
#   B: chosen -4, reference -3: r(c) = -1; rejected -0.5 four times, reference -0.75: r(r) = 1; D = -2, D' = -1.25
POLICY = torch.tensor([0, -0.5, -0.5, -0.5, -0.5, 0, -1, -3, 0, -6, 0, -4])
REFERENCE = torch.tensor([0, -0.75, -0.75, -0.75, -0.75, 0, -2, -4, 0, -5, 0, -3])
LENGTHS = torch.tensor([5, 3, 2, 2])
IN_LOSS = POLICY < 0
BATCH = Preferences(
    token_ids=torch.arange(12),
    lengths=LENGTHS,
    loss_mask=IN_LOSS,
    pair=torch.tensor([7, 3, 3, 7]),
    chosen=torch.tensor([False, True, False, True]),
    margin=torch.zeros(4),
)
BETA = 0.5
PAIR_A, PAIR_B = 3, 7


class Given(ForwardModel):
    """A ForwardModel whose logprobs are those above."""

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Tensor:
        """[T] nats."""
        return REFERENCE if reference else POLICY


def outcome(algorithm: Dpo | Orpo | Simpo) -> tuple[LossOutput, Tensor]:
    """The loss, and its gradient at the logprobs."""
    batch = algorithm.prepare(BATCH, Given())
    logprobs = POLICY.clone().requires_grad_()
    result = algorithm.loss(
        PolicyOutput(logprobs=logprobs, entropy=torch.ones(12)), batch, algorithm.token_weights(batch)
    )
    result.loss.backward()
    assert logprobs.grad is not None
    return result, logprobs.grad


CASES: list[tuple[str, dict[str, Any], float, float]] = [
    # beta D is 1.5 and -1. log(1 + e^-1.5) = 0.201413, log(1 + e) = 1.313262.
    ("sigmoid", {}, 0.201413, 1.313262),
    # cDPO: 0.9 * 0.201413 + 0.1 * 1.701413; 0.9 * 1.313262 + 0.1 * 0.313262.
    ("sigmoid", {"label_smoothing": 0.1}, 0.351413, 1.213262),
    # (0.181272 - 0.170141) / 0.8; (1.181936 - 0.031326) / 0.8.
    ("robust", {"label_smoothing": 0.1}, 0.013913, 1.438262),
    ("hinge", {}, 0.0, 2.0),
    # 1 / (2 beta) = 1: (2 - 1)^2, (-1.25 - 1)^2; and (3 - 1)^2, (-2 - 1)^2.
    ("ipo_mean", {}, 1.0, 5.0625),
    ("ipo_sum", {}, 4.0, 9.0),
    # log 0.9 = -0.105361, log 0.1 = -2.302585:
    # 0.817574 (-0.201413 + 0.105361) + 0.182426 (-1.701413 + 2.302585) = -0.078530 + 0.109669;
    # 0.268941 (-1.313262 + 0.105361) + 0.731059 (-0.313262 + 2.302585) = -0.324854 + 1.454312.
    ("exo_pair", {"label_smoothing": 0.1}, 0.031139, 1.129458),
    # beta r: A 1, -0.5; B -0.5, 0.5. 0.313262 + (1.313262 + 0.474077) / 2; 0.974077 + (0.474077 + 0.974077) / 2.
    ("nca_pair", {}, 1.206931, 1.698154),
    # 0.313262 + 0.474077; 0.974077 + 0.974077.
    ("bco_pair", {}, 0.787339, 1.948154),
    # (2 - 1)^2 + (-1 + 1)^2; (-1 - 1)^2 + (1 + 1)^2.
    ("sppo_hard", {}, 1.0, 8.0),
    # 1 - 0.731059 + 0.377541; 1 - 0.377541 + 0.622459.
    ("apo_zero", {}, 0.646482, 1.244918),
    # 0.731059 + 1 - 0.817574; 0.377541 + 1 - 0.268941.
    ("apo_down", {}, 0.913485, 1.108600),
    # Gates sigmoid(3) = 0.952574, sigmoid(-2) = 0.119203:
    # 0.047426 * 0.201413 + 0.952574 * 0.223130; 0.880797 * 1.313262 + 0.119203 * 2.718282.
    ("discopop", {"discopop_temperature": 0.5}, 0.222100, 1.480744),
    # beta D' is 1 and -0.625: log(1 + e^0.625) = 1.053701.
    ("sigmoid_norm", {}, 0.313262, 1.053701),
    # Margins of the policy 2 and -2, of the reference -1 and 0. The greater meet: 2 - 0; the smaller: -2 - -1.
    ("aot", {}, 0.313262, 0.974077),
    # The greater meet: r(c) of A 2 - r(r) of B 1; the smaller: r(c) of B -1 - r(r) of A -1 = 0.
    ("aot_unpaired", {}, 0.474077, 0.693147),
    # 0.313262 + 0.1 * 1 more than without: 0.474077 + 0.1 * 0.5, 0.693147 + 0.
    ("aot_unpaired", {"label_smoothing": 0.1}, 0.524077, 0.693147),
    # Likelihood per chosen token: (1 + 3) / 2 and 4.
    ("sigmoid", {"rpo_alpha": 0.25}, 0.201413 + 0.5, 1.313262 + 1.0),
    ("sigmoid", {"mixed_with": {"hinge": 0.5}}, 0.201413, 1.313262 + 1.0),
]


@pytest.mark.parametrize(("loss", "settings", "of_a", "of_b"), CASES)
def test_losses_of_the_family(loss: str, settings: dict[str, Any], of_a: float, of_b: float) -> None:
    result, _ = outcome(Dpo(DpoConfig(loss=PairLoss(loss), beta=BETA, **settings)))
    assert result.loss.item() == pytest.approx((of_a + of_b) / 2, abs=2e-6)
    assert result.metrics["train/loss"] == Sum(result.loss.item())


ALONE = [case for case in CASES if "aot" not in case[0] and "rpo_alpha" not in case[1]]
"""Those that look at one pair at a time."""


@pytest.mark.parametrize(("loss", "settings", "of_a", "of_b"), ALONE)
def test_each_pair_has_its_loss_by_itself(loss: str, settings: dict[str, Any], of_a: float, of_b: float) -> None:
    """The rejected ratios of the two pairs are each other's negative: their mean would hide a wrong sign."""
    algorithm = Dpo(DpoConfig(loss=PairLoss(loss), beta=BETA, **settings))
    batch = algorithm.prepare(BATCH, Given())
    for number, expected in ((PAIR_A, of_a), (PAIR_B, of_b)):
        members = (BATCH.pair == number).nonzero().flatten()
        alone = batch.select(members.tolist())
        own = torch.cat([POLICY.split(BATCH.lengths.tolist())[member] for member in members.tolist()])
        result = algorithm.loss(
            PolicyOutput(logprobs=own, entropy=torch.ones(len(own))), alone, algorithm.token_weights(alone)
        )
        assert result.loss.item() == pytest.approx(expected, abs=2e-6)


def test_every_loss_of_the_family_is_worked_above() -> None:
    assert {loss for loss, *_ in CASES} == {str(loss) for loss in PairLoss}


def test_gradient_of_dpo() -> None:
    # -beta sigmoid(-beta D) on chosen tokens, + on rejected ones, over 2 pairs: 0.5 * 0.182426 / 2, 0.5 * 0.731059 / 2.
    _, gradient = outcome(Dpo(DpoConfig(beta=BETA)))
    a, b = 0.0456065, 0.1827648
    expected = [0, b, b, b, b, 0, -a, -a, 0, a, 0, -b]
    torch.testing.assert_close(gradient, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", [PairLoss.AOT, PairLoss.AOT_UNPAIRED])
def test_gradients_of_sorted_losses_are_those_of_the_sort(loss: PairLoss) -> None:
    _, gradient = outcome(Dpo(DpoConfig(loss=loss, beta=BETA, label_smoothing=0.1)))
    logprobs = POLICY.clone().requires_grad_()
    # A's and B's chosen, then their rejected sequences.
    rows = [(torch.arange(6, 8), torch.arange(11, 12)), (torch.arange(9, 10), torch.arange(1, 5))]
    policy = [torch.stack([logprobs[tokens].sum() for tokens in side]) for side in rows]
    frozen = [torch.stack([REFERENCE[tokens].sum() for tokens in side]) for side in rows]
    left, right = (
        (policy[0] - policy[1], frozen[0] - frozen[1])
        if loss is PairLoss.AOT
        else (policy[0] - frozen[0], policy[1] - frozen[1])
    )
    logits = BETA * (left.sort().values - right.sort().values)
    (-0.9 * logits.sigmoid().log() - 0.1 * (-logits).sigmoid().log()).mean().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(gradient, logprobs.grad)


def test_what_dpo_reports() -> None:
    result, _ = outcome(Dpo(DpoConfig(beta=BETA)))
    # Rewards: A 1 and -0.5, B -0.5 and 0.5. Logprobs: -4 and -6, -4 and -2.
    assert result.metrics == {
        "train/accuracy": Mean(1.0, 2.0),
        "train/reward_margin": Mean(0.5, 2.0),
        "train/chosen_reward": Mean(0.5, 2.0),
        "train/rejected_reward": Mean(0.0, 2.0),
        "train/chosen_logprob_nats": Mean(-8.0, 2.0),
        "train/rejected_logprob_nats": Mean(-8.0, 2.0),
        "train/loss": Sum(result.loss.item()),
        "train/entropy_nats": Mean(8.0, 8.0),
    }


def test_discopop_is_finite_far_from_the_reference() -> None:
    # Of logits of -100 the exponential alone would be infinite and its gate 0.
    algorithm = Dpo(DpoConfig(loss=PairLoss.DISCOPOP, beta=50.0))
    result, gradient = outcome(algorithm)
    assert result.loss.isfinite() and gradient.isfinite().all()
    # A: exp(-150), which is 0; B: 100.
    assert result.loss.item() == pytest.approx(50.0)


def test_orpo() -> None:
    # Means: A -2 and -6, B -4 and -0.5. Log odds: -2 - log(1 - e^-2) = -1.854587, -6 + 0.002482 = -5.997518;
    # -4 + 0.018486 = -3.981514, -0.5 + 0.932752 = 0.432752. Ratios 4.142931 and -4.414266.
    result, _ = outcome(Orpo(OrpoConfig(odds_weight=0.5)))
    assert result.metrics["train/log_odds_ratio"] == Mean(pytest.approx(-0.271335, abs=2e-6), 2.0)  # type: ignore[arg-type]
    # 2 + 0.5 * log(1 + e^-4.142931) = 2 + 0.5 * 0.015750; 4 + 0.5 * log(1 + e^4.414266) = 4 + 0.5 * 4.426297.
    assert result.loss.item() == pytest.approx((2.007875 + 6.213149) / 2, abs=2e-6)
    assert result.metrics["train/nll_nats"] == Mean(6.0, 2.0)


def test_odds_of_certainty_are_finite() -> None:
    certain = torch.zeros(1, requires_grad=True)
    log_odds_ratio(certain, torch.tensor([-1.0])).sum().backward()
    assert certain.grad is not None and certain.grad.isfinite().all()


def test_simpo() -> None:
    # 2 * mean: A -4 and -12, B -8 and -1. Margins 8 - 1.5 = 6.5 and -7 - 1.5 = -8.5: log(1 + e^-6.5) = 0.001502,
    # log(1 + e^8.5) = 8.500203.
    result, gradient = outcome(Simpo(SimpoConfig(beta=2.0, gamma=1.5)))
    assert result.loss.item() == pytest.approx((0.001502 + 8.500203) / 2, abs=2e-6)
    assert result.metrics["train/reward_margin"] == Mean(1.0, 2.0)
    # B's rejected tokens: 2 / 4 * sigmoid(8.5) = 0.5 * 0.999797, over 2 pairs.
    torch.testing.assert_close(gradient[1:5], torch.full((4,), 0.2499492), atol=1e-6, rtol=0)


def test_pairs_go_back_to_where_their_sequences_stand() -> None:
    values = torch.arange(4.0)
    chosen, rejected = pairs(values, BATCH)
    # Pair 3 comes before pair 7.
    assert (chosen.tolist(), rejected.tolist()) == ([1.0, 3.0], [2.0, 0.0])
    assert from_pairs(chosen, rejected, BATCH).tolist() == values.tolist()


@pytest.mark.parametrize("rows", [[0], [0, 1], [0, 0], [1, 2, 3]])
def test_half_a_pair_is_refused(rows: list[int]) -> None:
    batch = BATCH.select(rows)
    with pytest.raises((AssertionError, RuntimeError), match="a pair was split"):
        pairs(torch.zeros(len(rows)), batch)


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (DpoConfig, {"beta": 0.0}, r"beta must be above 0 \(at 0 the loss does not depend on the policy\), got 0.0"),
        (DpoConfig, {"label_smoothing": 0.5}, "label_smoothing must be below 0.5, got 0.5"),
        (
            DpoConfig,
            {"loss": PairLoss.HINGE, "label_smoothing": 0.1},
            "label_smoothing has no effect with loss=hinge, got 0.1; remove it",
        ),
        (DpoConfig, {"loss": PairLoss.ROBUST}, "label_smoothing must be above 0 with loss=robust, which at 0 is"),
        (DpoConfig, {"loss": PairLoss.EXO_PAIR}, "label_smoothing must be above 0 with loss=exo_pair, which at 0"),
        (DpoConfig, {"discopop_temperature": 0.1}, "discopop_temperature has no effect without discopop, got 0.1"),
        (
            DpoConfig,
            {"loss": PairLoss.DISCOPOP, "discopop_temperature": 1.0},
            "discopop_temperature must be below 1, got 1.0",
        ),
        (DpoConfig, {"rpo_alpha": -1.0}, "rpo_alpha must be at least 0, got -1.0"),
        (DpoConfig, {"mixed_with": {"ipo": 1.0}}, "mixed_with must name losses of sigmoid, robust, .* got 'ipo'"),
        (DpoConfig, {"mixed_with": {"sigmoid": 1.0}}, "mixed_with must name losses .* besides loss, got 'sigmoid'"),
        (DpoConfig, {"mixed_with": {"hinge": 0.0}}, "mixed_with must be above 0, got 0.0 for 'hinge'"),
        (
            DpoConfig,
            {"loss": PairLoss.AOT, "mixed_with": {"aot_unpaired": 1.0}},
            "mixed_with must not combine aot and aot_unpaired",
        ),
        (
            OrpoConfig,
            {"odds_weight": 0.0},
            "odds_weight must be above 0 .at 0 rejected responses have no effect.*, got 0.0",
        ),
        (SimpoConfig, {"beta": 0.0}, "beta must be above 0 .*, got 0.0"),
        (SimpoConfig, {"gamma": -0.1}, "gamma must be at least 0, got -0.1"),
        (SimpoConfig, {"label_smoothing": 0.5}, "label_smoothing must be below 0.5, got 0.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)
