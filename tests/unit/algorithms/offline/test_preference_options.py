"""Options of DPO's family, CPO, AlphaPO and the likelihood's mean, on the pairs of test_preference.py, by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlframe.algorithms.base import OfflineAlgorithm
from rlframe.algorithms.cpo import Cpo, CpoConfig, CpoLoss
from rlframe.algorithms.dpo import Dpo, DpoConfig
from rlframe.algorithms.kto import Kto, KtoConfig, KtoLoss
from rlframe.algorithms.orpo import Orpo, OrpoConfig
from rlframe.algorithms.reference import ReferenceSource, ReferenceUpdateConfig
from rlframe.algorithms.simpo import Simpo, SimpoConfig
from rlframe.ops.comparisons.f_divergence import FDivergence, scores
from rlframe.ops.comparisons.preference import (
    PAIR_LOSSES,
    UNSCORED,
    LikelihoodMean,
    LogRatios,
    PairLoss,
    PairSettings,
    length_discounts,
)
from rlframe.types.results import LossOutput, Mean, PolicyOutput
from tests.unit.algorithms.offline.test_preference import BATCH, BETA, POLICY, Given

TOKENS = LikelihoodMean.TOKENS


def outcome(algorithm: OfflineAlgorithm, renyi_entropy: float | None = None) -> LossOutput:
    """The loss of the two pairs, of which every token's distribution has this entropy."""
    batch = algorithm.prepare(BATCH, Given())
    second_order = None if renyi_entropy is None else torch.full((12,), renyi_entropy)
    policy = PolicyOutput(logprobs=POLICY, entropy=torch.ones(12), renyi_entropy=second_order)
    return algorithm.loss(policy, batch, algorithm.token_weights(batch))


@pytest.mark.parametrize(
    ("settings", "of_a", "of_b"),
    [
        # f' at r = 2, -1, -1, 1. beta D: 0.5 (0.864665 + 1.718282), 0.5 (-1.718282 - 0.632121).
        ({"f_divergence": FDivergence.FORWARD_KL}, 0.242840, 1.444280),
        # log sigmoid(2) - log sigmoid(-1) = -0.126928 + 1.313262, log sigmoid(-1) - log sigmoid(1) = -1.
        ({"f_divergence": FDivergence.JS}, 0.439915, 0.974077),
        # 2 (1 - e^(-r / 2)): 0.5 (1.264241 + 1.297443), 0.5 (-1.297443 - 0.786939).
        ({"f_divergence": FDivergence.ALPHA}, 0.245142, 1.344280),
        # 4 (1 - e^(-r / 4)): 0.5 (1.573877 + 1.136102), 0.5 (-1.136102 - 0.884797).
        ({"f_divergence": FDivergence.ALPHA, "f_alpha": 0.25}, 0.229483, 1.320912),
        # Per token A has 0.864665 / 2 + 1.718282 = 2.150615, B -1.718282 - 0.632121 / 4 = -1.876312; less 1, squared.
        ({"f_divergence": FDivergence.FORWARD_KL, "loss": PairLoss.IPO_MEAN}, 1.323914, 8.273173),
        # A shares one token: r(c) = 1 + 0.5 * 1, D = 2.5. B too: r(r) = 0.25 + 0.5 * 0.75, D = -1.625.
        ({"ld_alpha": 0.5}, 0.251929, 1.179742),
        # D = 1 + 1 and -1 - 0.25.
        ({"ld_alpha": 0.0}, 0.313262, 1.053701),
    ],
)
def test_divergences_and_length_discounts(settings: dict[str, Any], of_a: float, of_b: float) -> None:
    result = outcome(Dpo(DpoConfig(beta=BETA, **settings)))
    assert result.loss.item() == pytest.approx((of_a + of_b) / 2, abs=2e-6)


@pytest.mark.parametrize("loss", PairLoss)
def test_a_divergence_changes_the_losses_for_which_it_is_accepted_and_no_other(loss: PairLoss) -> None:
    ones = torch.ones(2)
    sides = {"chosen": torch.tensor([2.0, -1.0]), "rejected": torch.tensor([-1.0, 1.0])}
    given = LogRatios(**sides, chosen_tokens=ones, rejected_tokens=ones, chosen_matched=ones, rejected_matched=ones)
    settings = PairSettings(beta=BETA, label_smoothing=0.1)
    plain, other = (
        PAIR_LOSSES[loss](replace(given, divergence=divergence), settings)
        for divergence in (FDivergence.REVERSE_KL, FDivergence.JS)
    )
    assert torch.equal(plain, other) == (loss in UNSCORED)


def test_tokens_beyond_the_shorter_response_are_discounted() -> None:
    expected = [1, 1, 0.5, 0.5, 0.5, 1, 1, 0.5, 1, 1, 1, 1]
    assert length_discounts(BATCH, 0.5).tolist() == expected
    assert length_discounts(BATCH.select([]), 0.5).tolist() == []


def test_scores_have_slope_one_and_value_zero_where_policy_and_reference_agree() -> None:
    for divergence in FDivergence:
        ratios = torch.zeros(1, requires_grad=True)
        value = scores(ratios, divergence, alpha=0.3)
        value.sum().backward()
        assert value.item() == pytest.approx(0, abs=1e-6)
        # Of JS f''(1) is a half.
        assert ratios.grad is not None and ratios.grad.item() == (0.5 if divergence is FDivergence.JS else 1.0)


def test_scores_are_finite_far_from_the_reference() -> None:
    for divergence in FDivergence:
        ratios = torch.tensor([-1e4, 1e4], requires_grad=True)
        value = scores(ratios, divergence, alpha=0.5)
        value.sum().backward()
        assert value.isfinite().all() and ratios.grad is not None and ratios.grad.isfinite().all()


def test_wpo_weighs_pairs_by_how_likely_the_policy_is_to_say_them() -> None:
    # Means of log p + 2: A chosen -2 + 2, rejected -6 + 2: e^-4 = 0.0183156. B -4 + 2, -0.5 + 2: e^-0.5 = 0.6065307.
    result = outcome(Dpo(DpoConfig(beta=BETA, wpo=True)), 2.0)
    expected = (0.0183156 * 0.201413 + 0.6065307 * 1.313262) / 2
    assert result.loss.item() == pytest.approx(expected, abs=2e-6)
    # The likelihood is not weighed.
    both = outcome(Dpo(DpoConfig(beta=BETA, wpo=True, rpo_alpha=0.25)), 2.0)
    assert both.loss.item() == pytest.approx(expected + 0.25 * 3, abs=2e-6)


def test_the_likelihood_may_be_pooled_over_tokens() -> None:
    # Chosen logprobs add up to -4 on two tokens and to -4 on one: 8/3 a token, where the mean of pairs is (2 + 4) / 2.
    result = outcome(Dpo(DpoConfig(beta=BETA, rpo_alpha=0.25, likelihood_mean=TOKENS)))
    assert result.loss.item() == pytest.approx((0.201413 + 1.313262) / 2 + 0.25 * 8 / 3, abs=2e-6)
    assert result.metrics["train/nll_nats"] == Mean(8.0, 3.0)
    by_pair, by_token = (
        outcome(Orpo(OrpoConfig(odds_weight=0.5, likelihood_mean=mean))).loss.item() for mean in LikelihoodMean
    )
    assert by_token == pytest.approx(by_pair - 3 + 8 / 3, abs=2e-6)


@pytest.mark.parametrize(
    ("settings", "of_a", "of_b"),
    [
        # Logprobs: A -4 and -6, B -4 and -2: beta D = 1 and -1.
        ({}, 0.313262, 1.313262),
        ({"label_smoothing": 0.1}, 0.413262, 1.213262),
        ({"loss": CpoLoss.HINGE}, 0.0, 2.0),
        # Per token: A -2 + 6 = 4, B -4 + 0.5 = -3.5; less 1, squared.
        ({"loss": CpoLoss.IPO_MEAN}, 9.0, 20.25),
    ],
)
def test_cpo(settings: dict[str, Any], of_a: float, of_b: float) -> None:
    alone = outcome(Cpo(CpoConfig(beta=BETA, nll_coefficient=0.0, **settings)))
    assert alone.loss.item() == pytest.approx((of_a + of_b) / 2, abs=2e-6)
    # Likelihood per chosen token: 2 and 4, or 8/3.
    whole = outcome(Cpo(CpoConfig(beta=BETA, **settings)))
    assert whole.loss.item() == pytest.approx((of_a + of_b) / 2 + 3, abs=2e-6)
    pooled = outcome(Cpo(CpoConfig(beta=BETA, nll_coefficient=0.5, likelihood_mean=TOKENS, **settings)))
    assert pooled.loss.item() == pytest.approx((of_a + of_b) / 2 + 4 / 3, abs=2e-6)


def test_alpha_po_shapes_the_rewards_of_simpo() -> None:
    # 2 (1 - e^(-mean / 2)) / 0.5: A 4 (1 - e) = -6.873127 and 4 (1 - e^3) = -76.342148; B 4 (1 - e^2) = -25.556224 and
    # 4 (1 - e^0.25) = -1.136102. Less gamma: 67.969020 and -25.920123.
    result = outcome(Simpo(SimpoConfig(beta=2.0, gamma=1.5, alpha=0.5)))
    assert result.loss.item() == pytest.approx(25.920123 / 2, abs=1e-5)
    # With alpha = -0.5, 4 (e^(mean / 2) - 1) * -1: 4 (e^-1 - e^-3) - 1.5 = -0.227630, 4 (e^-2 - e^-0.25) - 1.5 =
    # -4.073862: log(1 + e^0.227630) = 0.813429, log(1 + e^4.073862) = 4.090725.
    result = outcome(Simpo(SimpoConfig(beta=2.0, gamma=1.5, alpha=-0.5)))
    assert result.loss.item() == pytest.approx((0.813429 + 4.090725) / 2, abs=2e-6)


def test_cpo_simpo_is_simpo_with_the_likelihood() -> None:
    without, with_nll = (
        outcome(Simpo(SimpoConfig(nll_coefficient=coefficient))).loss.item() for coefficient in (0.0, 0.5)
    )
    assert with_nll == pytest.approx(without + 1.5, abs=2e-6)


NAN, INFINITE = float("nan"), float("inf")
FIELDS = [
    *((DpoConfig, name) for name in ("beta", "ld_alpha", "rpo_alpha", "label_smoothing", "discopop_temperature")),
    (DpoConfig, "f_alpha"),
    *((CpoConfig, name) for name in ("beta", "label_smoothing", "nll_coefficient")),
    *((SimpoConfig, name) for name in ("beta", "gamma", "label_smoothing", "alpha", "nll_coefficient")),
    *((KtoConfig, name) for name in ("beta", "desirable_weight", "undesirable_weight")),
    (OrpoConfig, "odds_weight"),
    (ReferenceUpdateConfig, "mix"),
]


@pytest.mark.parametrize("value", [NAN, INFINITE, 1e300, -1e300])
@pytest.mark.parametrize(("config", "name"), FIELDS, ids=str)
def test_numbers_that_are_none_are_refused(config: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        config(**{name: value})


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (DpoConfig, {"mixed_with": {"hinge": INFINITE}}, "mixed_with must be at most 10000.0, got inf for 'hinge'"),
        (
            DpoConfig,
            {"f_divergence": FDivergence.JS, "loss": PairLoss.NCA_PAIR},
            "f_divergence has no effect with loss=nca_pair, got js",
        ),
        (DpoConfig, {"f_alpha": 0.3}, "f_alpha has no effect without f_divergence=alpha, got 0.3"),
        (
            DpoConfig,
            {"f_divergence": FDivergence.ALPHA, "f_alpha": 1.0},
            "f_alpha must be below 1 .*forward_kl.*, got 1.0",
        ),
        (DpoConfig, {"ld_alpha": 1.5}, "ld_alpha must be at most 1, got 1.5"),
        (DpoConfig, {"likelihood_mean": TOKENS}, "likelihood_mean has no effect with rpo_alpha=0, got tokens"),
        (CpoConfig, {"likelihood_mean": TOKENS, "nll_coefficient": 0.0}, "no effect with nll_coefficient=0"),
        (SimpoConfig, {"likelihood_mean": TOKENS}, "likelihood_mean has no effect with nll_coefficient=0"),
        (CpoConfig, {"loss": CpoLoss.HINGE, "label_smoothing": 0.1}, "label_smoothing has no effect with loss=hinge"),
        (SimpoConfig, {"alpha": 11.0}, "alpha must be at most 10, got 11.0"),
        (KtoConfig, {"reference": ReferenceSource.PRECOMPUTED}, "reference must be live with loss=kto"),
        (ReferenceUpdateConfig, {"every_steps": -1}, r"every_steps must be at least 0 \(0: never\), got -1"),
        (ReferenceUpdateConfig, {"every_steps": 2, "mix": 0.0}, "mix must be above 0, got 0.0"),
        (ReferenceUpdateConfig, {"mix": 0.5}, "mix has no effect with every_steps=0, got 0.5"),
    ],
)
def test_options_that_cannot_work_are_refused(config: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)


def test_a_precomputed_reference_cannot_follow() -> None:
    precomputed = {"reference": ReferenceSource.PRECOMPUTED, "reference_update": ReferenceUpdateConfig(every_steps=2)}
    with pytest.raises(ValueError, match=r"reference_update.every_steps must be 0 with reference=precomputed, got 2"):
        DpoConfig(**precomputed)
    with pytest.raises(ValueError, match=r"reference_update.every_steps must be 0 with reference=precomputed, got 2"):
        KtoConfig(loss=KtoLoss.APO_ZERO_UNPAIRED, **precomputed)
    assert Kto(KtoConfig(loss=KtoLoss.APO_ZERO_UNPAIRED, reference=ReferenceSource.PRECOMPUTED)).precomputes_reference


def test_the_reference_moves_after_every_so_many_batches() -> None:
    update = ReferenceUpdateConfig(every_steps=3)
    # Batches of two optimizer steps: after the third and the sixth batch.
    assert [update.due(first, 2) for first in range(0, 14, 2)] == [False, False, True, False, False, True, False]
    assert not ReferenceUpdateConfig().due(0, 1)
