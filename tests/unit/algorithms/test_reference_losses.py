"""Losses, gradients and advantages against those that TRL and verl computed on the same inputs.

The numbers were recorded by examples/benchmarks/record_reference_losses.py. Names differ: verl's clip_ratio_c and,
where it is above 1 + epsilon_high, TRL's delta are our dual_clip; TRL's epsilon_high of CISPO is the cap itself, 1 +
our clip_high, and it has no lower bound; verl's k3+ is k3_plus, TRL's use_bias_correction_kl is k3_weighted.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.cispo import Cispo, CispoConfig
from rlframe.algorithms.correction import CorrectionConfig, MaskConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.gspo import Gspo, GspoConfig
from rlframe.algorithms.policy_gradient import PolicyGradient
from rlframe.algorithms.ppo import Ppo, PpoConfig
from rlframe.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlframe.algorithms.rloo import Rloo, RlooConfig
from rlframe.algorithms.sapo import Sapo, SapoConfig
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.correction import MaskOf, RatioOf
from rlframe.ops.kl import KlEstimator, kl_per_token
from rlframe.types.batch import Batch
from rlframe.types.results import PolicyOutput, ValueOutput

RECORD = json.loads((Path(__file__).parent / "reference_losses.json").read_text(encoding="utf-8"))
PADDED = {name: torch.tensor(value) for name, value in RECORD["inputs"].items()}
LENGTHS = [7, 3, 5, 1, 6, 2, 7, 4]
LONGEST = RECORD["constant_length"]


def packed(padded: Tensor) -> Tensor:
    """[T] of [R, LONGEST]: each row after one token of a prompt, without what is padding."""
    return torch.cat([torch.cat([torch.zeros(1), row[:length]]) for row, length in zip(padded, LENGTHS, strict=True)])


def unpacked(values: Tensor) -> Tensor:
    """[R, LONGEST] of [T], the inverse."""
    rows = values.split([1 + length for length in LENGTHS])
    return torch.stack([torch.nn.functional.pad(row[1:], (0, LONGEST + 1 - len(row))) for row in rows])


def batch(*, old: bool = True) -> Batch:
    """The inputs as ours."""
    total = sum(LENGTHS) + len(LENGTHS)
    return Batch(
        token_ids=torch.zeros(total).long(),
        lengths=torch.tensor(LENGTHS) + 1,
        loss_mask=packed(PADDED["mask"]).bool(),
        rollout_logprobs=packed(PADDED["rollout_logprobs"]),
        group=torch.arange(len(LENGTHS)) // RECORD["group_size"],
        rewards=PADDED["rewards"],
        versions=torch.zeros(len(LENGTHS)).long(),
        old_logprobs=packed(PADDED["old_logprobs"]) if old else None,
        reference_logprobs=packed(PADDED["reference_logprobs"]),
    )


def assert_same(expected: dict[str, Any], loss: Tensor, logprobs: Tensor) -> None:
    """To 1e-6: the loss, and its gradient by every logprob."""
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(unpacked(logprobs.grad), torch.tensor(expected["gradient"]), atol=1e-6, rtol=0)
    assert torch.tensor(expected["gradient"]).count_nonzero() > 5


def grpo(**settings: Any) -> Grpo:
    """GRPO with DAPO's bounds."""
    return Grpo(GrpoConfig(**{"clip_low": 0.2, "clip_high": 0.28} | settings))


def ppo(aggregation: Aggregation = Aggregation.TOKEN_MEAN, *masks: MaskConfig, **correction: Any) -> Grpo:
    """As verl's losses were recorded."""
    length = LONGEST if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None
    settings = {"aggregation": aggregation, "constant_length": length, "dual_clip": 1.5}
    return grpo(**settings, correction=CorrectionConfig(masks=list(masks), **correction))


def bounds(of: MaskOf) -> MaskConfig:
    """As verl's were recorded."""
    return MaskConfig(of=of, low=0.5, high=1.5)


TOKEN, PRODUCT = RatioOf.TOKEN, RatioOf.SEQ_PROD
TOKEN_MEAN = Aggregation.TOKEN_MEAN
SEQ_MEAN = {"aggregation": Aggregation.SEQ_MEAN_TOKEN_MEAN}
KL = SEQ_MEAN | {"kl_coefficient": 0.1}
CASES: list[tuple[str, str, PolicyGradient]] = [
    ("verl", "ppo token-mean", ppo()),
    ("verl", "ppo seq-mean-token-sum", ppo(Aggregation.SEQ_MEAN_TOKEN_SUM)),
    ("verl", "ppo seq-mean-token-mean", ppo(Aggregation.SEQ_MEAN_TOKEN_MEAN)),
    ("verl", "ppo seq-mean-token-sum-norm", ppo(Aggregation.SEQ_MEAN_TOKEN_SUM_NORM)),
    ("verl", "ppo token 1.5", ppo(weight=TOKEN, weight_cap=1.5)),
    ("verl", "ppo token 0.5_1.5", ppo(TOKEN_MEAN, bounds(MaskOf.TOKEN), weight=TOKEN)),
    ("verl", "ppo sequence 1.5", ppo(weight=PRODUCT, weight_cap=1.5)),
    (
        "verl",
        "ppo sequence 0.5_1.5",
        ppo(TOKEN_MEAN, bounds(MaskOf.SEQ_PROD), weight=PRODUCT),
    ),
    ("verl", "gspo", Gspo(GspoConfig(clip_low=0.1, clip_high=0.2))),
    ("verl", "cispo", Cispo(CispoConfig(clip_low=0.3, clip_high=0.4))),
    ("verl", "sapo", Sapo(SapoConfig())),
    ("trl", "grpo", grpo(**SEQ_MEAN)),
    ("trl", "dr_grpo", grpo(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, constant_length=LONGEST)),
    ("trl", "dapo", grpo()),
    ("trl", "dapo delta", grpo(dual_clip=1.5)),
    ("trl", "grpo kl", grpo(**KL)),
    ("trl", "grpo weighted kl", grpo(**KL, kl_estimator=KlEstimator.K3_WEIGHTED)),
    ("trl", "gspo", Gspo(GspoConfig(clip_low=0.2, clip_high=0.28))),
    ("trl", "cispo", Cispo(CispoConfig(clip_high=0.4))),
    ("trl", "sapo", Sapo(SapoConfig())),
]


@pytest.mark.parametrize(
    ("framework", "name", "algorithm"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_losses_and_gradients_are_theirs(framework: str, name: str, algorithm: PolicyGradient) -> None:
    data = batch().with_advantages(packed(PADDED["advantages"]))
    logprobs = packed(PADDED["logprobs"]).requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    assert_same(RECORD[framework][name], algorithm.loss(policy, data, algorithm.token_weights(data)).loss, logprobs)


def test_every_recorded_loss_is_compared() -> None:
    compared = {(framework, name) for framework, name, _ in CASES}
    assert compared == {(framework, name) for framework in ("verl", "trl") for name in RECORD[framework]}


@pytest.mark.parametrize("name", RECORD["verl_kl"])
def test_kl_estimates_and_their_gradients_are_verls(name: str) -> None:
    logprobs, data = packed(PADDED["logprobs"]).requires_grad_(), batch()
    kl = kl_per_token(logprobs, packed(PADDED["reference_logprobs"]), KlEstimator(name.replace("+", "_plus")))
    assert_same(RECORD["verl_kl"][name], (kl * data.loss_mask).sum() / data.loss_mask.sum(), logprobs)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("grpo", grpo()),
        ("dr_grpo", grpo(normalize_by=NormalizeBy.NONE)),
        ("rloo", Rloo(RlooConfig())),
        ("reinforce_plus_plus", ReinforcePlusPlus(ReinforcePlusPlusConfig(discount=0.9))),
        ("reinforce_plus_plus_baseline", ReinforcePlusPlus(ReinforcePlusPlusConfig(group_baseline=True))),
    ],
)
def test_advantages_are_verls(name: str, algorithm: PolicyGradient) -> None:
    expected = torch.tensor(RECORD["verl_advantages"][name])
    torch.testing.assert_close(unpacked(algorithm.advantages(batch())), expected, atol=2e-6, rtol=0)


def after(values: Tensor) -> Tensor:
    """[T] what a critic whose values of the states before the tokens are [R, LONGEST] says after each token."""
    return packed(values).roll(-1)


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_MEAN])
def test_a_critics_advantages_returns_and_loss_are_verls(aggregation: Aggregation) -> None:
    expected = RECORD["verl_critic"]
    algorithm = Ppo(PpoConfig(discount=0.9, gae_lambda=0.8, value_clip=0.5, aggregation=aggregation))
    data = algorithm.with_values(batch(), after(PADDED["values"])[:, None])
    assert data.returns is not None
    torch.testing.assert_close(unpacked(data.returns), torch.tensor(expected["returns"]), atol=1e-6, rtol=0)
    advantages = unpacked(algorithm.advantages(data))
    torch.testing.assert_close(advantages, torch.tensor(expected["advantages"]), atol=2e-6, rtol=0)
    values = packed(PADDED["new_values"]).requires_grad_()
    said = ValueOutput(values=values.roll(-1)[:, None])
    loss = algorithm.critic.loss(said, data, algorithm.critic.token_weights(data)).loss
    assert_same(expected[str(aggregation).replace("_", "-")], loss, values)
