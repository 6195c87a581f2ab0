"""Losses, gradients and advantages against those that TRL and verl computed on the same inputs.

The numbers were recorded by examples/benchmarks/record_reference_losses.py. Names differ: verl's clip_ratio_c and,
where it is above 1 + epsilon_high, TRL's delta are our dual_clip, delta always our ratio_cap; TRL's epsilon_high of
CISPO is the cap itself, 1 + our clip_high, and it has no lower bound; verl's k3+ is k3_plus, TRL's
use_bias_correction_kl is k3_weighted.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.cispo import Cispo, CispoConfig
from rlframe.algorithms.clip_cov import ClipCov, ClipCovConfig
from rlframe.algorithms.correction import CorrectionConfig, MaskConfig, weight_mean
from rlframe.algorithms.dppo import Dppo, DppoConfig
from rlframe.algorithms.gmpo import Gmpo, GmpoConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.gspo import Gspo, GspoConfig
from rlframe.algorithms.kl_cov import KlCov, KlCovConfig
from rlframe.algorithms.policy_gradient import PolicyGradient
from rlframe.algorithms.ppo import Ppo, PpoConfig
from rlframe.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlframe.algorithms.rloo import Rloo, RlooConfig
from rlframe.algorithms.sapo import Sapo, SapoConfig
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.choice import covariances, drawn, greatest
from rlframe.ops.correction import RATIOS, MaskOf, RatioOf
from rlframe.ops.kl import KlEstimator, kl_per_token
from rlframe.ops.surrogate import Trust
from rlframe.types.batch import Batch, TrainBatch
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
        versions=torch.zeros(total).long(),
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


def bounds(of: MaskOf, low: float | None = 0.5, high: float = 1.5) -> MaskConfig:
    """As verl's were recorded."""
    return MaskConfig(of=of, low=low, high=high)


TOKEN, PRODUCT = RatioOf.TOKEN, RatioOf.SEQ_PROD
TOKEN_MEAN = Aggregation.TOKEN_MEAN
REJECTED_ABOVE = {"token": 0.1, "seq_sum": 1.0, "seq_mean": 0.12, "seq_max": 0.4}
"""Nats of k2 and of k3 in the record."""
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
    ("verl", "gmpo", Gmpo(GmpoConfig(clip_low=0.2, clip_high=0.3))),
    ("verl", "dppo tv", Dppo(DppoConfig(limit_low=0.03, limit_high=0.05, ratio_cap=1.3))),
    ("verl", "dppo kl", Dppo(DppoConfig(divergence=Trust.KL, limit_low=0.01, limit_high=0.02, ratio_cap=1.3))),
    *(
        ("verl", f"ppo rejected {of}", ppo(TOKEN_MEAN, bounds(of, None, REJECTED_ABOVE[of.rpartition("_")[0]])))
        for of in sorted(set(MaskOf) - RATIOS)
    ),
    (
        "verl",
        "ppo rejected token_k1,seq_mean_k1",
        ppo(TOKEN_MEAN, bounds(MaskOf.TOKEN, 0.5, 2.0), bounds(MaskOf.SEQ_GEO, 0.8, 1.25)),
    ),
    # verl's bounds, 0.9 and 1.25, are on engine / trainer.
    ("verl", "ppo bypass", ppo(TOKEN_MEAN, bounds(MaskOf.SEQ_GEO, 0.8, 1 / 0.9), bypass=True)),
    ("trl", "grpo", grpo(**SEQ_MEAN)),
    ("trl", "dr_grpo", grpo(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, constant_length=LONGEST)),
    ("trl", "dapo", grpo()),
    ("trl", "dapo delta", grpo(dual_clip=1.5)),
    ("trl", "dapo delta below", grpo(ratio_cap=1.1)),
    ("trl", "dapo off-policy mask", grpo(correction=CorrectionConfig(stray_limit_nats=0.1))),
    ("trl", "dapo clamped weights", grpo(correction=CorrectionConfig(weight=TOKEN, weight_floor=0.8, weight_cap=1.5))),
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
    if isinstance(algorithm, Dppo):
        # The others' may be those of probabilities above 1, which only ratios can do with.
        data.old_logprobs = packed(PADDED["possible_old_logprobs"])
    logprobs = packed(PADDED["logprobs"]).requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    assert_same(RECORD[framework][name], algorithm.loss(policy, data, algorithm.token_weights(data)).loss, logprobs)


@pytest.mark.parametrize("of", [TOKEN, PRODUCT])
def test_normalised_weights_are_verls(of: RatioOf) -> None:
    algorithm = ppo(weight=of, weight_cap=1.5)
    data = batch().with_advantages(packed(PADDED["advantages"]))
    gap = packed(PADDED["old_logprobs"] - PADDED["rollout_logprobs"])
    # As train_batch has it.
    data.advantages /= weight_mean(algorithm.config.correction, gap, data)
    logprobs = packed(PADDED["logprobs"]).requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    name = f"ppo {'token' if of is TOKEN else 'sequence'} 1.5 normalised"
    assert_same(RECORD["verl"][name], algorithm.loss(policy, data, algorithm.token_weights(data)).loss, logprobs)


def test_gspo_with_an_advantage_of_each_token_is_verls() -> None:
    algorithm = Gspo(GspoConfig(clip_low=0.1, clip_high=0.2))
    data = batch().with_advantages(packed(PADDED["token_advantages"]))
    logprobs = packed(PADDED["logprobs"]).requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss = algorithm.loss(policy, data, algorithm.token_weights(data)).loss
    assert_same(RECORD["verl"]["gspo token"], loss, logprobs)


def test_the_tokens_of_the_greatest_entropy_are_trls() -> None:
    algorithm = grpo(top_entropy_fraction=0.3, kl_coefficient=0.1)
    assert algorithm.needs_entropies
    made = batch().with_advantages(packed(PADDED["advantages"]))
    data = algorithm.with_entropies(made, packed(PADDED["entropies"]))
    assert isinstance(data, TrainBatch)
    logprobs = packed(PADDED["logprobs"]).requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss = algorithm.loss(policy, data, algorithm.token_weights(data)).loss
    assert_same(RECORD["trl"]["dapo top entropy"], loss, logprobs)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_chosen_by_covariance_are_verls(name: str) -> None:
    """verl's covariances are of the policy of the moment, ours of the one before the update; here both are the
    former's, and the draw takes all candidates."""
    data = batch().with_advantages(packed(PADDED["token_advantages"]))
    shares = covariances(packed(PADDED["logprobs"]), data.advantages, data.loss_mask)
    if name == "clip_cov":
        algorithm = ClipCov(ClipCovConfig(clip_low=0.2, clip_high=0.28))
        candidates = (shares > 0.1) & (shares < 0.6)
        data.chosen = drawn(candidates, 100, token_ids=data.token_ids, values=data.rollout_logprobs)
        assert data.chosen.tolist() == candidates.tolist() and candidates.sum() > 3
    else:
        algorithm = KlCov(KlCovConfig(penalty_coefficient=0.5))
        data.chosen = greatest(shares, int(0.2 * int(data.loss_mask.sum())))
    logprobs = packed(PADDED["logprobs"]).requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss, expected = algorithm.loss(policy, data, algorithm.token_weights(data)).loss, RECORD["verl"][name]
    # Where its clip stops a token, verl's value is the clipped one and ours 0; neither has a gradient.
    assert_same(expected | ({"loss": loss.item()} if name == "clip_cov" else {}), loss, logprobs)


def test_every_recorded_loss_is_compared() -> None:
    compared = {(framework, name) for framework, name, _ in CASES}
    compared |= {("verl", name) for name in ("ppo token 1.5 normalised", "ppo sequence 1.5 normalised", "gspo token")}
    compared |= {("verl", "clip_cov"), ("verl", "kl_cov"), ("trl", "dapo top entropy")}
    assert compared == {(framework, name) for framework in ("verl", "trl") for name in RECORD[framework]}


@pytest.mark.parametrize("name", RECORD["verl_kl"])
def test_kl_estimates_and_their_gradients_are_verls(name: str) -> None:
    logprobs, data = packed(PADDED["logprobs"]).requires_grad_(), batch()
    reference, cap = packed(PADDED["reference_logprobs"]), None
    if name.endswith(" far"):
        # Ten times as far, where verl's cap of 10 nats is met.
        reference, cap = logprobs.detach() + 10 * (reference - logprobs.detach()), 10.0
    estimator = KlEstimator(name.removesuffix(" far").replace("+", "_plus"))
    kl = kl_per_token(logprobs, reference, estimator, cap=cap)
    assert cap is None or (kl == cap).any()
    assert_same(RECORD["verl_kl"][name], (kl * data.loss_mask).sum() / data.loss_mask.sum(), logprobs)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("grpo", grpo()),
        ("dr_grpo", grpo(normalize_by=NormalizeBy.NONE)),
        ("grpo kl in the reward", grpo(kl_coefficient=0.1, kl_estimator=KlEstimator.K1, kl_in_reward=True)),
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
