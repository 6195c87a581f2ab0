"""Preference losses against TRL's on the same random inputs, as examples/benchmarks/record_preference_losses.py wrote.

Where a convention differs it is named: our `ipo_mean` is TRL's `ipo`; TRL's sigmoid and sigmoid_norm do not look at the
label smoothing, ours do; the likelihood in ORPO, which TRL takes over prompts too, is left out of both.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.algorithms.cpo import Cpo, CpoConfig, CpoLoss
from rlframe.algorithms.dpo import Dpo, DpoConfig
from rlframe.algorithms.kto import Kto, KtoConfig, KtoLoss
from rlframe.algorithms.orpo import Orpo, OrpoConfig
from rlframe.algorithms.simpo import Simpo, SimpoConfig
from rlframe.ops.comparisons.f_divergence import FDivergence
from rlframe.ops.comparisons.preference import SMOOTHED, LikelihoodMean, PairLoss
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, PolicyOutput
from rlframe.types.supervised import Preferences, Unpaired

RECORDED = json.loads((Path(__file__).parent / "reference_losses_preference.json").read_text())
SETTINGS, LOSSES = RECORDED["settings"], RECORDED["losses"]
UNSMOOTHED = (PairLoss.SIGMOID, PairLoss.SIGMOID_NORM)
"""Losses whose label smoothing TRL 1.16 does not look at."""


def packed(rows: list[list[float]]) -> Tensor:
    """[T] the rows' logprobs, each behind a prompt of one token."""
    return torch.tensor([value for row in rows for value in (0.0, *row)])


def sequences(rows: list[list[float]]) -> dict[str, Tensor]:
    """Fields of a batch with such rows."""
    flags = [flag for row in rows for flag in (False, *[True] * len(row))]
    return {
        "token_ids": torch.arange(len(flags)),
        "lengths": torch.tensor([1 + len(row) for row in rows]),
        "loss_mask": torch.tensor(flags),
    }


class Given(ForwardModel):
    """A ForwardModel with the recorded logprobs."""

    def __init__(self, rows: dict[str, Any]):
        self.rows = rows

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Tensor:
        """[T] nats."""
        return packed(self.rows["reference" if reference else "policy"])


def outcome(algorithm: OfflineAlgorithm, batch: Sequences, rows: dict[str, Any]) -> LossOutput:
    """The loss of the recorded policy."""
    logprobs = packed(rows["policy"])
    renyi_entropy = torch.full_like(logprobs, -SETTINGS["log_sum_squares"])
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs), renyi_entropy=renyi_entropy)
    return algorithm.loss(policy, batch, algorithm.token_weights(batch))


def of_pairs(algorithm: OfflineAlgorithm) -> LossOutput:
    """The loss of the recorded pairs: all chosen sequences, then all rejected ones."""
    rows = RECORDED["pairs"]
    count = rows["chosen"]
    batch = Preferences(
        **sequences(rows["policy"]),
        pair=torch.arange(count).repeat(2),
        chosen=torch.arange(2 * count) < count,
        margin=torch.zeros(2 * count),
    )
    return outcome(algorithm, algorithm.prepare(batch, Given(rows)), rows)


@pytest.mark.parametrize("loss", [loss for loss in PairLoss if loss is not PairLoss.IPO_SUM])
def test_losses_of_the_family_are_those_of_trl(loss: PairLoss) -> None:
    smoothing = SETTINGS["label_smoothing"] if loss in SMOOTHED and loss not in UNSMOOTHED else 0.0
    temperature = {"discopop_temperature": SETTINGS["discopop_temperature"]} if loss is PairLoss.DISCOPOP else {}
    result = of_pairs(Dpo(DpoConfig(loss=loss, beta=SETTINGS["beta"], label_smoothing=smoothing, **temperature)))
    expected = LOSSES["ipo" if loss is PairLoss.IPO_MEAN else loss]
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)


def test_simpo_is_that_of_trl() -> None:
    algorithm = Simpo(
        SimpoConfig(beta=SETTINGS["beta"], gamma=SETTINGS["gamma"], label_smoothing=SETTINGS["label_smoothing"])
    )
    assert of_pairs(algorithm).loss.item() == pytest.approx(LOSSES["simpo"], rel=1e-6)


def test_the_odds_ratio_is_that_of_trl() -> None:
    result = of_pairs(Orpo(OrpoConfig(odds_weight=SETTINGS["beta"])))
    nll = result.metrics["train/nll_nats"].value
    assert result.loss.item() - nll == pytest.approx(LOSSES["orpo_without_nll"], abs=1e-6)


@pytest.mark.parametrize("loss", KtoLoss)
def test_kto_is_that_of_trl(loss: KtoLoss) -> None:
    rows = RECORDED["kto"]
    count = len(rows["policy"])
    # TRL's choice of mismatched responses is part of the recording; ours is another.
    gaps = [sum(row) for row in rows["policy_mismatched"]], [sum(row) for row in rows["reference_mismatched"]]
    kl = max(0.0, sum(ours - theirs for ours, theirs in zip(*gaps, strict=True)) / count)
    assert kl > 0.5
    batch = Unpaired(
        **sequences(rows["policy"]),
        desirable=torch.tensor(rows["desirable"]),
        kl_nats=torch.full((count,), kl if loss is KtoLoss.KTO else 0.0),
        reference_logprobs=packed(rows["reference"]),
    )
    weights = {name: SETTINGS[name] for name in ("desirable_weight", "undesirable_weight")}
    result = outcome(Kto(KtoConfig(loss=loss, beta=SETTINGS["beta"], **weights)), batch, rows)
    assert result.loss.item() == pytest.approx(LOSSES[loss], rel=1e-6)


SMOOTHED_AOT = {"loss": PairLoss.AOT, "label_smoothing": SETTINGS["label_smoothing"]}
LD = {"ld_alpha": SETTINGS["ld_alpha"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "forward_kl": {"f_divergence": FDivergence.FORWARD_KL},
    "js_divergence": {"f_divergence": FDivergence.JS},
    "hinge forward_kl": {"f_divergence": FDivergence.FORWARD_KL, "loss": PairLoss.HINGE},
    "ld_alpha": LD,
    "aot ld_alpha": LD | SMOOTHED_AOT,
    "use_weighting": {"wpo": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_dpo_are_those_of_trl(name: str) -> None:
    result = of_pairs(Dpo(DpoConfig(beta=SETTINGS["beta"], **OPTIONS[name])))
    assert result.loss.item() == pytest.approx(RECORDED["options"][name], rel=1e-6)


def test_the_pooled_likelihood_is_the_sft_loss_of_trl() -> None:
    alone, added = (
        of_pairs(Dpo(DpoConfig(beta=SETTINGS["beta"], **settings))).loss.item()
        for settings in ({}, {"rpo_alpha": 0.5, "likelihood_mean": LikelihoodMean.TOKENS})
    )
    assert added - alone == pytest.approx(0.5 * RECORDED["options"]["sft"], abs=1e-6)


@pytest.mark.parametrize("loss", CpoLoss)
def test_cpo_is_that_of_trl(loss: CpoLoss) -> None:
    smoothing = SETTINGS["label_smoothing"] if loss is CpoLoss.SIGMOID else 0.0
    config = CpoConfig(loss=loss, beta=SETTINGS["beta"], label_smoothing=smoothing, nll_coefficient=0.0)
    expected = RECORDED["options"]["cpo ipo" if loss is CpoLoss.IPO_MEAN else f"cpo {loss}"]
    assert of_pairs(Cpo(config)).loss.item() == pytest.approx(expected, rel=1e-6)


def test_alpha_po_is_that_of_trl() -> None:
    settings = {name: SETTINGS[name] for name in ("beta", "gamma", "label_smoothing", "alpha")}
    result = of_pairs(Simpo(SimpoConfig(**settings)))
    assert result.loss.item() == pytest.approx(RECORDED["options"]["simpo alpha"], rel=1e-6)


def test_every_recorded_option_is_compared() -> None:
    others = {"sft", "cpo sigmoid", "cpo hinge", "cpo ipo", "simpo alpha"}
    assert {*OPTIONS, *others} == set(RECORDED["options"])
