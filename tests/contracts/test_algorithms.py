"""Every file of rlframe/algorithms: the four invariances, of loss, gradient and metrics.

Each check also runs on an algorithm that is broken on purpose, to show that it would notice.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from rlframe.algorithms.base import Algorithm, ForwardModel, OfflineAlgorithm, OnlineAlgorithm
from rlframe.algorithms.correction import CorrectionConfig, MaskConfig
from rlframe.algorithms.cpo import CpoLoss
from rlframe.algorithms.dpo import Dpo, DpoConfig
from rlframe.algorithms.embedding import Embedding, EmbeddingConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.kto import Kto, KtoConfig, KtoLoss
from rlframe.algorithms.reranker import RerankerLoss
from rlframe.algorithms.sft import Sft, SftConfig
from rlframe.megatron.messages.microbatch import Microbatch, split
from rlframe.ops.advantages import NormalizeBy
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.comparisons.f_divergence import FDivergence
from rlframe.ops.comparisons.preference import LikelihoodMean, PairLoss, matched_ratios, pairs
from rlframe.ops.correction import RATIOS, MaskOf, RatioOf
from rlframe.ops.kl import KlEstimator
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import Trust
from rlframe.types.batch import Batch, Sequences, TrainBatch
from rlframe.types.results import LossOutput, Mean, Metric, Peak, PolicyOutput, StateOutput, Sum, merge
from rlframe.types.supervised import Contrasted, Preferences, Unpaired
from rlframe.utils import registry
from tests.contracts.algorithm_scenes import (
    CREDITS,
    KINDS,
    LENGTHS,
    Bigrams,
    Scene,
    contrasted,
    preferences,
    read_as,
    scene,
    trained_on,
)

NAMES = registry.names("rlframe.algorithms")
CONFIGS = Path(__file__).parents[2] / "configs" / "algorithm"

NEED_SMOOTHING = (PairLoss.ROBUST, PairLoss.EXO_PAIR)
NORM = {"aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, "constant_length": 7}
CORRECTIONS = [
    {"weight": RatioOf.TOKEN, "weight_cap": 1.02, "weight_floor": 0.99},
    {"weight": RatioOf.TOKEN, "masks": [MaskConfig(of=MaskOf.TOKEN, low=0.7, high=1.5)]},
    {"weight": RatioOf.SEQ_PROD, "weight_cap": 1.05},
    {"weight": RatioOf.SEQ_GEO, "masks": [MaskConfig(of=MaskOf.SEQ_PROD, low=0.6)]},
    {"masks": [MaskConfig(of=MaskOf.SEQ_GEO, low=0.8, high=1.25), MaskConfig(of=MaskOf.TOKEN, high=1.04)]},
    *({"masks": [MaskConfig(of=of, high=0.3 if "sum" in of else 0.06)]} for of in MaskOf if of not in RATIOS),
    {"weight": RatioOf.TOKEN, "weight_cap": 1.2, "normalize_weights": True},
    {"weight": RatioOf.SEQ_PROD, "normalize_weights": True, "masks": [MaskConfig(of=MaskOf.SEQ_MAX_K3, high=0.1)]},
    {"stray_limit_nats": 0.01},
    {"bypass": True},
    {"bypass": True, "masks": [MaskConfig(of=MaskOf.SEQ_GEO, low=0.99, high=1.01)]},
]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "grpo": [
        *({"correction": CorrectionConfig(**correction)} for correction in CORRECTIONS),
        {"dual_clip": 1.3, "clip_high": 0.1},
        *({"aggregation": mode} for mode in Aggregation if mode is not Aggregation.SEQ_MEAN_TOKEN_SUM_NORM),
        NORM,
        *({"kl_coefficient": 0.3, "kl_estimator": estimator} for estimator in KlEstimator),
        {"normalize_by": NormalizeBy.NONE, "clip_low": 0.05, "clip_high": 0.1},
        {"entropy_coefficient": 0.2},
        {"distillation_coefficient": 0.5},
        *({"normalize_by": by} for by in NormalizeBy),
        {"kl_coefficient": 0.3, "kl_cap": 0.05},
        {"kl_coefficient": 0.3, "kl_in_reward": True, "normalize_by": NormalizeBy.BATCH_STD},
        {"ratio_cap": 1.05},
        {"top_entropy_fraction": 0.4, "kl_coefficient": 0.3, "entropy_coefficient": 0.2},
    ],
    "rloo": [
        {"aggregation": Aggregation.TOKEN_MEAN},
        {"kl_coefficient": 0.3},
        {"kl_coefficient": 0.3, "kl_in_reward": False},
        {"normalize_advantages": True},
        {"clip_low": 0.05, "clip_high": 0.1, "entropy_coefficient": 0.2},
    ],
    "gspo": [
        {"clip_low": 0.1, "clip_high": 0.2, "kl_coefficient": 0.3},
        {"aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM},
        {"clip_low": 0.1, "clip_high": 0.2, "distillation_coefficient": 0.5},
        {
            "clip_low": 0.3,
            "clip_high": 0.4,
            "correction": CorrectionConfig(masks=[MaskConfig(of=MaskOf.TOKEN, low=0.7)]),
        },
    ],
    "cispo": [
        {"correction": CorrectionConfig(weight=RatioOf.SEQ_PROD, masks=[MaskConfig(of=MaskOf.SEQ_GEO, high=1.05)])},
        {"clip_low": 0.1, "clip_high": 0.2},
        {"kl_coefficient": 0.3, "entropy_coefficient": 0.2},
    ],
    "gmpo": [
        {"clip_low": 0.1, "clip_high": 0.2},
        {"aggregation": Aggregation.TOKEN_MEAN, "distillation_coefficient": 0.5},
        {"correction": CorrectionConfig(masks=[MaskConfig(of=MaskOf.TOKEN, low=0.9)])},
    ],
    "dppo": [{"limit_low": 0.02, "limit_high": 0.03}, {"divergence": Trust.KL, "limit_low": 1e-3, "ratio_cap": 1.1}],
    "clip_cov": [{"chosen_fraction": 0.15, "covariance_low": 0.0}, {"chosen_fraction": 0.5, "covariance_low": -1.0}],
    "kl_cov": [{"chosen_fraction": 0.3, "penalty_coefficient": 0.5}],
    "dpo": [
        *({"loss": loss, "label_smoothing": 0.1 * (loss in NEED_SMOOTHING)} for loss in PairLoss),
        {"label_smoothing": 0.2, "mixed_with": {"bco_pair": 0.5}, "rpo_alpha": 0.3},
        *({"f_divergence": divergence} for divergence in FDivergence),
        {"rpo_alpha": 0.3, "likelihood_mean": LikelihoodMean.TOKENS, "wpo": True},
        *({"ld_alpha": 0.3, "loss": loss} for loss in (PairLoss.SIGMOID, PairLoss.AOT)),
    ],
    "cpo": [*({"loss": loss} for loss in CpoLoss), {"nll_coefficient": 0.0, "label_smoothing": 0.1}],
    "kto": [{"loss": KtoLoss.APO_ZERO_UNPAIRED}, {"desirable_weight": 1.3, "undesirable_weight": 0.0}],
    "orpo": [{"odds_weight": 0.5}, {"likelihood_mean": LikelihoodMean.TOKENS}],
    "reward_model": [{"margin_scale": 0.5, "centring": 0.3}],
    "classification": [{"num_classes": 4}],
    "reranker": [{"loss": RerankerLoss.POINTWISE}, {"temperature": 0.5, "min_documents": 3}],
    "embedding": [
        {"cosine": False, "temperature": 2.0},
        {"matryoshka_dimensions": [2, 3]},
        {"fake_negative_margin": 0.1},
    ],
    "simpo": [
        {"gamma": 0.0, "label_smoothing": 0.2},
        *({"alpha": alpha, "nll_coefficient": 0.5} for alpha in (-0.5, 0.7)),
    ],
    "reinforce_plus_plus": [
        {"kl_coefficient": 0.3, "discount": 0.9},
        {"group_baseline": True},
        {"group_baseline": True, "kl_coefficient": 0.3, "kl_estimator": KlEstimator.K2},
    ],
    "ppo": [
        {"gae_lambda": 0.9, "discount": 0.95, "kl_coefficient": 0.3},
        {"whiten_advantages": False, "aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM, "entropy_coefficient": 0.2},
    ],
    "sapo": [{"temperature_negative": 3.0}, {"aggregation": Aggregation.TOKEN_MEAN, "kl_coefficient": 0.3}],
    "gkd": [
        {"on_policy_fraction": 0.0, "nll_coefficient": 0.3},
        {"aggregation": Aggregation.SEQ_MEAN_TOKEN_MEAN, "nll_coefficient": 0.3},
        {"on_policy_fraction": 1.0, "divergence_cap": 0.5},
    ],
    "on_policy_distillation": [
        {"clip_low": 0.05, "clip_high": 0.1},
        {"reward_coefficient": 0.7, "group_size": 4, "kl_coefficient": 0.3},
    ],
    "sft": [
        *({"aggregation": mode} for mode in Aggregation if mode not in ("prompt_mean", "seq_mean_token_sum_norm")),
        {"dft": True},
    ],
}
"""Settings under which each algorithm is checked, besides its defaults."""
CASES = [(name, options) for name in NAMES for options in [{}, *OPTIONS.get(name, []), *CREDITS.get(name, [])]]


def needs_old(case: tuple[str, dict[str, Any]]) -> bool:
    """True for settings that a step of one update is refused with."""
    return case[1].get("correction", CorrectionConfig()).normalize_weights


def further(case: tuple[str, dict[str, Any]], with_old: bool) -> list[pytest.MarkDecorator]:
    """Returns the marks of a case. `make check` has each algorithm with its defaults, `make test` each option with the
    logprobs that it needs."""
    if case[1] and with_old != needs_old(case):
        return [pytest.mark.thorough]
    return [pytest.mark.later] if case[1] else []


def make(case: tuple[str, dict[str, Any]]) -> Algorithm:
    """The algorithm of one case, as a run builds it."""
    name, options = case
    component, config = registry.find("rlframe.algorithms", name, key="algorithm.name")
    return component(config(**options))


@dataclasses.dataclass
class Outcome:
    """What must not change: gradients in the order of the scene's tokens."""

    loss: Tensor
    gradient: Tensor
    entropy_gradient: Tensor
    metrics: dict[str, Metric]


def outcome(algorithm: Algorithm, scene: Scene, *, num_ranks: int = 1, max_tokens: int = 1000) -> Outcome:
    """The optimizer step, split as PolicyGroup and Trainer split it."""
    logprobs, entropy = scene.logprobs.clone().requires_grad_(), scene.entropy.clone().requires_grad_()
    weights = algorithm.token_weights(scene.batch)
    ranks, plan = split(scene.batch, weights, num_ranks=num_ranks, max_tokens=max_tokens)
    places = torch.arange(scene.batch.num_tokens).split(scene.batch.lengths.tolist())

    def share(microbatch: Microbatch, indices: list[int]) -> LossOutput:
        tokens = torch.cat([places[i] for i in indices]) if indices else torch.zeros(0, dtype=torch.int64)
        policy = read_as(algorithm.output, logprobs[tokens], entropy[tokens])
        result = algorithm.loss(policy, microbatch.batch, microbatch.weights)  # type: ignore[attr-defined]
        result.loss.backward()
        return result

    shares = [
        [share(microbatch, indices) for microbatch, indices in zip(rank.microbatches(), rank_plan, strict=True)]
        for rank, rank_plan in zip(ranks, plan, strict=True)
    ]
    return Outcome(
        loss=torch.stack([one.loss.detach() for rank in shares for one in rank]).sum(),
        gradient=torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad,
        entropy_gradient=torch.zeros_like(entropy) if entropy.grad is None else entropy.grad,
        metrics=merge(merge(one.metrics for one in rank) for rank in shares),
    )


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Equal but for the rounding of a sum in another order."""
    for field in ("loss", "gradient", "entropy_gradient"):
        torch.testing.assert_close(
            getattr(actual, field),
            getattr(expected, field),
            atol=1e-6,
            rtol=1e-5,
            msg=lambda text, field=field: f"{field}: {text}",
        )
    assert actual.metrics.keys() == expected.metrics.keys()
    for key, metric in expected.metrics.items():
        assert type(actual.metrics[key]) is type(metric), key
        assert dataclasses.astuple(actual.metrics[key]) == pytest.approx(
            dataclasses.astuple(metric), rel=1e-5, abs=1e-5
        ), key


def check_masked_tokens_change_nothing(algorithm: Algorithm, scene: Scene) -> None:
    """Whatever stands where the mask is False, the outcome is the same, and the gradient there is zero."""
    outside = ~scene.batch.loss_mask
    changed = {"token_ids": torch.where(outside, 49, scene.batch.token_ids)}
    for name in (
        "rollout_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs", "advantages", "values", "returns"
    ):  # fmt: skip
        if (value := getattr(scene.batch, name, None)) is not None:
            changed[name] = torch.where(outside, -7.0, value)
    other = Scene(
        dataclasses.replace(scene.batch, **changed),
        torch.where(outside.view(-1, *[1] * (scene.logprobs.dim() - 1)), -11.0, scene.logprobs),
        torch.where(outside, 3.0, scene.entropy),
    )
    expected = outcome(algorithm, scene)
    assert_same(outcome(algorithm, other), expected)
    assert not expected.gradient[outside].any() and not expected.entropy_gradient[outside].any()


def check_microbatches_change_nothing(algorithm: Algorithm, scene: Scene) -> None:
    """One micro-batch, several of different sizes, and one per rollout give the same."""
    longest = largest_unit(scene.batch)
    expected = outcome(algorithm, scene)
    for max_tokens in (max(20, longest), longest):
        assert_same(outcome(algorithm, scene, max_tokens=max_tokens), expected)


def check_ranks_change_nothing(algorithm: Algorithm, scene: Scene) -> None:
    """Two ranks, five with some empty micro-batches, and more ranks than rollouts give the same."""
    max_tokens, expected = max(15, largest_unit(scene.batch)), outcome(algorithm, scene)
    for num_ranks in (2, 5, 15):
        assert_same(outcome(algorithm, scene, num_ranks=num_ranks, max_tokens=max_tokens), expected)


def largest_unit(batch: Sequences) -> int:
    """Tokens of the longest sequence, or of the longest that must stay together."""
    return int(torch.zeros(100, dtype=torch.int64).index_add(0, batch.units(), batch.lengths).max())


def check_order_changes_nothing(algorithm: Algorithm, scene: Scene) -> None:
    """Groups and the rollouts within them may come in any order; advantages are computed and batches prepared in it."""
    order = [9, 2, 11, 0, 5, 8, 7, 3, 10, 1, 4, 6]
    flat = torch.cat([torch.arange(scene.batch.num_tokens).split(LENGTHS)[i] for i in order])
    batch = scene.batch.select(order)
    if isinstance(batch, TrainBatch):
        assert isinstance(algorithm, OnlineAlgorithm)
        before = Batch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)})
        batch = trained_on(algorithm, before)
    elif isinstance(algorithm, OfflineAlgorithm):
        batch = algorithm.prepare(batch, Bigrams())
    result = outcome(algorithm, Scene(batch, scene.logprobs[flat], scene.entropy[flat]))
    back = torch.argsort(flat)
    result.gradient, result.entropy_gradient = result.gradient[back], result.entropy_gradient[back]
    assert_same(result, outcome(algorithm, scene))


CHECKS = [
    check_masked_tokens_change_nothing,
    check_microbatches_change_nothing,
    check_ranks_change_nothing,
    check_order_changes_nothing,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    ("case", "with_old"),
    # Offline batches have no logprobs from before the update.
    [
        pytest.param(case, with_old, marks=further(case, with_old))
        for case in CASES
        for with_old in sorted({needs_old(case), make(case).online})
    ],
    ids=str,
)
def test_invariance(case: tuple[str, dict[str, Any]], with_old: bool, check: Callable[..., None]) -> None:
    algorithm = make(case)
    check(algorithm, scene(algorithm, with_old=with_old))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_outcome_is_not_trivial(case: tuple[str, dict[str, Any]]) -> None:
    """Invariances hold for a loss of zero too."""
    algorithm = make(case)
    result = outcome(algorithm, scene(algorithm, with_old=True))
    # Advantages of a group add up to 0: near ratio one, the mean over rollouts is close to it, the gradient is not.
    # Of the 32 tokens GSPO's narrow bounds leave five unclipped here.
    assert result.loss.abs() > 1e-4 and (result.gradient.abs() > 1e-4).sum() >= 5
    assert bool(result.entropy_gradient.any()) == (case[1].get("entropy_coefficient", 0) > 0)
    assert isinstance(result.metrics["train/loss"], Sum)
    assert result.metrics["train/loss"].value == pytest.approx(float(result.loss), rel=1e-5)


@pytest.mark.parametrize(
    "case",
    # Of the options the rule of aggregation decides.
    [pytest.param(case, marks=[pytest.mark.thorough] if case[1].keys() - {"aggregation"} else []) for case in CASES],
    ids=str,
)
def test_token_weights_and_advantages_are_zero_where_masked(case: tuple[str, dict[str, Any]]) -> None:
    algorithm = make(case)
    batch = scene(algorithm, with_old=needs_old(case)).batch
    weights = algorithm.token_weights(batch)
    assert weights.shape == batch.token_ids.shape and weights.dtype == torch.float32
    assert not weights[~batch.loss_mask].any() and (weights[batch.loss_mask] > 0).all()
    if isinstance(batch, TrainBatch):
        assert not batch.advantages[~batch.loss_mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_builds_from_its_defaults_and_has_a_yaml(name: str) -> None:
    component, config = registry.find("rlframe.algorithms", name, key="algorithm.name")
    algorithm = component(config())
    assert isinstance(algorithm, Algorithm)
    assert config().name == name
    assert yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["name"] == name
    assert algorithm.group_size >= 1
    assert isinstance(algorithm, OnlineAlgorithm if algorithm.online else OfflineAlgorithm)


class LocalMean(Sft):
    """Broken: divides by the micro-batch's own count, as several frameworks did."""

    def loss(self, policy: PolicyOutput, batch: Sequences, weights: Tensor) -> LossOutput:
        """The mean over what this micro-batch holds."""
        return LossOutput(loss=-(policy.logprobs * batch.loss_mask).sum() / batch.loss_mask.sum().clamp(min=1))


class Maskless(Sft):
    """Broken: prompt tokens count too."""

    def loss(self, policy: PolicyOutput, batch: Sequences, weights: Tensor) -> LossOutput:
        """The sum over all tokens."""
        return LossOutput(loss=-policy.logprobs.sum() / 100)


class AveragedMetric(Sft):
    """Broken: reports each micro-batch's mean as if all micro-batches were of one size."""

    def loss(self, policy: PolicyOutput, batch: Sequences, weights: Tensor) -> LossOutput:
        """Right but for the metric."""
        right = super().loss(policy, batch, weights)
        mean = float((policy.logprobs.detach() * batch.loss_mask).sum() / batch.loss_mask.sum().clamp(min=1))
        return LossOutput(loss=right.loss, metrics={"train/nll_nats": Mean(mean, 1.0)})


class PeakLoss(Sft):
    """Broken: the greatest share is not the loss."""

    def loss(self, policy: PolicyOutput, batch: Sequences, weights: Tensor) -> LossOutput:
        """Right but for the metric."""
        right = super().loss(policy, batch, weights)
        return LossOutput(loss=right.loss, metrics={"train/loss": Peak(float(right.loss.detach()))})


class FirstOfGroup(Grpo):
    """Broken: the baseline is whichever rollout comes first."""

    def advantages(self, batch: Batch) -> Tensor:
        """Reward minus that of the batch's first rollout."""
        return torch.repeat_interleave(batch.rewards - batch.rewards[0], batch.lengths) * batch.loss_mask


class Splittable(Preferences):
    """Broken: a pair may be cut in two."""

    def units(self) -> Tensor:
        """Each sequence on its own."""
        return torch.arange(self.num_sequences)


class SplitPairs(Dpo):
    """DPO of pairs that are not kept together."""

    data = "splittable"


KINDS["splittable"] = lambda sequences: preferences(sequences, Splittable)


class LocalPairs(Dpo):
    """Broken: divides by the pairs of the micro-batch."""

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Tensor) -> LossOutput:
        """Right but for the denominator."""
        return super().loss(policy, batch, self.token_weights(batch))


class LocalSort(Dpo):
    """Broken: sorts what the micro-batch holds."""

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Tensor) -> LossOutput:
        """Right when there is one micro-batch."""
        assert batch.reference_logprobs is not None
        ratios = sequence_sums(policy.logprobs.detach() - batch.reference_logprobs, batch)
        chosen, rejected = matched_ratios(*pairs(ratios, batch))
        order = torch.argsort(batch.pair * 2 + (~batch.chosen).long())
        matched = torch.stack([chosen, rejected], 1).flatten()[torch.argsort(order)]
        return super().loss(policy, dataclasses.replace(batch, matched=matched), weights)


class FirstHalf(Kto):
    """Broken: the KL is estimated from the first half of the step."""

    def prepare(self, batch: Unpaired, model: ForwardModel) -> Unpaired:
        """Right but for the estimate."""
        half = super().prepare(batch.select(list(range(batch.num_sequences // 2))), model)
        return dataclasses.replace(super().prepare(batch, model), kl_nats=half.kl_nats.repeat(2))


class Together(Contrasted):
    """Contrasted whose queries stay with their own texts."""

    def units(self) -> Tensor:
        """The queries."""
        return self.group


class LocalNegatives(Embedding):
    """Broken: the negatives are what the micro-batch holds."""

    data = "together"

    def loss(self, policy: StateOutput, batch: Contrasted, weights: Tensor) -> LossOutput:
        """Right when there is one micro-batch."""
        return super().loss(policy, self.prepare(batch, Bigrams()), weights)


KINDS["together"] = lambda sequences: Together(**{
    field.name: getattr(contrasted(sequences), field.name) for field in dataclasses.fields(Contrasted)
})  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (LocalMean(SftConfig()), {check_microbatches_change_nothing, check_ranks_change_nothing}),
        (Maskless(SftConfig()), {check_masked_tokens_change_nothing}),
        (AveragedMetric(SftConfig()), {check_microbatches_change_nothing, check_ranks_change_nothing}),
        (PeakLoss(SftConfig()), {check_microbatches_change_nothing, check_ranks_change_nothing}),
        (FirstOfGroup(GrpoConfig()), {check_order_changes_nothing}),
        (SplitPairs(DpoConfig()), {check_microbatches_change_nothing, check_ranks_change_nothing}),
        (LocalPairs(DpoConfig()), {check_microbatches_change_nothing, check_ranks_change_nothing}),
        (
            LocalSort(DpoConfig(loss=PairLoss.AOT_UNPAIRED)),
            {check_microbatches_change_nothing, check_ranks_change_nothing},
        ),
        (FirstHalf(KtoConfig()), {check_order_changes_nothing}),
        (LocalNegatives(EmbeddingConfig()), {check_microbatches_change_nothing, check_ranks_change_nothing}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_a_broken_algorithm_is_caught(broken: Algorithm, caught_by: set[Callable[..., None]]) -> None:
    data = scene(broken, with_old=False)
    caught = set()
    for check in CHECKS:
        try:
            check(broken, data)
        except (AssertionError, RuntimeError):
            caught.add(check)
    assert caught == caught_by
