"""GKD and on-policy distillation against numbers worked by hand, and what their configs refuse."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.gkd import Gkd, GkdConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.on_policy_distillation import OnPolicyDistillation, OnPolicyDistillationConfig
from rlframe.algorithms.policy_gradient import PolicyGradient
from rlframe.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlframe.ops.aggregation import Aggregation
from rlframe.types.batch import Batch, Sequences
from rlframe.types.results import Divergence, DivergenceOutput, Mean, MeanIfAny, Output, PolicyOutput, Rest, merge
from rlframe.types.rollout import OFFLINE_VERSION
from rlframe.types.supervised import Examples

OLD = torch.tensor([0.0, -1.0, 0.0, -2.0, -3.0])
TEACHER = torch.tensor([7.0, -0.5, 7.0, -2.25, -5.0])
"""The student is 0.5 below the teacher at token 1, 0.25 above it at token 3 and 2 above it at token 4."""


def batch(**fields: Any) -> Batch:
    """Two rollouts of one prompt: tokens 1 | 3, 4 are sampled, the others prompt."""
    defaults: dict[str, Any] = {
        "token_ids": torch.tensor([5, 6, 5, 7, 8]),
        "lengths": torch.tensor([2, 3]),
        "loss_mask": torch.tensor([False, True, False, True, True]),
        "rollout_logprobs": OLD,
        "group": torch.tensor([0, 0]),
        "rewards": torch.tensor([1.0, 0.0]),
        "versions": torch.zeros(5).long(),
    }
    return Batch(**(defaults | fields))


def output(divergence: Tensor, logprobs: Tensor = OLD) -> DivergenceOutput:
    """What the ranks would say."""
    return DivergenceOutput(logprobs=logprobs, entropy=torch.ones(5), divergence=divergence)


def test_gkd_is_the_mean_divergence_of_the_tokens_in_the_loss() -> None:
    # A vocabulary of three at token 1: P_S = (1/2, 1/4, 1/4), P_T = (1/4, 1/4, 1/2), beta 1/2, so M = (3/8, 1/4, 3/8):
    # 1/2 log 4/3 + 1/4 log 2/3 = 0.0424746 nats (unit/megatron/vocab/test_divergence.py). Tokens 3 and 4: 0.1 and 0.4.
    first = math.log(4 / 3) / 2 + math.log(2 / 3) / 4
    algorithm = Gkd(GkdConfig())
    assert not algorithm.needs_old_logprobs
    data = batch()
    divergence = torch.tensor([9.0, first, 9.0, 0.1, 0.4]).requires_grad_()
    result = algorithm.loss(output(divergence), algorithm.train_batch(data), algorithm.token_weights(data))
    result.loss.backward()
    assert result.loss.item() == pytest.approx((0.0424746 + 0.1 + 0.4) / 3, abs=1e-6)
    assert divergence.grad is not None
    torch.testing.assert_close(divergence.grad, torch.tensor([0.0, 1 / 3, 0.0, 1 / 3, 1 / 3]))
    # No response is the data's.
    assert result.metrics["train/nll_nats"] == MeanIfAny(0.0, 0.0)
    assert result.metrics["rollout/logprob_gap_mean_nats"] == MeanIfAny(0.0, 3.0)


def test_the_likelihood_counts_on_the_datas_responses_only() -> None:
    algorithm = Gkd(GkdConfig(nll_coefficient=0.5))
    data = batch(versions=torch.tensor([OFFLINE_VERSION, 0, OFFLINE_VERSION, OFFLINE_VERSION, OFFLINE_VERSION]))
    logprobs = OLD.clone().requires_grad_()
    weights = algorithm.token_weights(data)
    result = algorithm.loss(output(torch.full((5,), 0.3), logprobs), algorithm.train_batch(data), weights)
    # 0.3 on each of three tokens, and 0.5 * (2 + 3) / 3 on the data's two.
    assert result.loss.item() == pytest.approx(0.3 + 2.5 / 3, abs=1e-6)
    result.loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 0.0, 0.0, -1 / 6, -1 / 6]))
    assert result.metrics["train/nll_nats"] == MeanIfAny(5.0, 2.0)
    assert result.metrics["rollout/logprob_gap_mean_nats"] == MeanIfAny(0.0, 1.0)


def test_a_tokens_divergence_may_be_capped() -> None:
    # 0.3 stays, 25 counts as 10 and -40, as a divergence over k tokens alone may be, as -10: neither has a gradient.
    algorithm, data = Gkd(GkdConfig(divergence_cap=10.0)), batch()
    divergence = torch.tensor([9.0, 0.3, 9.0, 25.0, -40.0]).requires_grad_()
    result = algorithm.loss(output(divergence), algorithm.train_batch(data), algorithm.token_weights(data))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.1)
    assert divergence.grad is not None
    torch.testing.assert_close(divergence.grad, torch.tensor([0.0, 1 / 3, 0.0, 0.0, 0.0]))
    # What is reported is not capped.
    assert result.metrics["train/divergence_nats"] == Mean(pytest.approx(-14.7), 3.0)  # type: ignore[arg-type]


def test_without_an_engine_every_response_is_the_datas() -> None:
    algorithm = Gkd(GkdConfig(on_policy_fraction=0.0, nll_coefficient=0.5, beta=0.1, temperature=0.9))
    assert not algorithm.online and algorithm.output is Output.DIVERGENCE and algorithm.needs_teacher
    assert algorithm.divergence == Divergence(beta=0.1, temperature=0.9)
    whole = batch()
    data = Sequences(token_ids=whole.token_ids, lengths=whole.lengths, loss_mask=whole.loss_mask)
    result = algorithm.loss(output(torch.full((5,), 0.3)), data, algorithm.token_weights(data))
    # 0.3 + 0.5 * (1 + 2 + 3) / 3
    assert result.loss.item() == pytest.approx(1.3, abs=1e-6)


def test_without_an_engine_tokens_count_by_the_weights_of_their_messages() -> None:
    # Token 1 of weight 0.5, tokens 3 and 4 of weight 2: (0.5 * 0.9 + 2 * 0.1 + 2 * 0.4) / 4.5.
    algorithm = Gkd(GkdConfig(on_policy_fraction=0.0))
    data = Examples(
        token_ids=torch.tensor([5, 6, 5, 7, 8]),
        lengths=torch.tensor([2, 3]),
        loss_mask=torch.tensor([False, True, False, True, True]),
        importance=torch.tensor([0.0, 0.5, 0.0, 2.0, 2.0]),
        channel=torch.tensor([0, 0]),
        channels=("chat",),
    )
    divergence = torch.tensor([9.0, 0.9, 9.0, 0.1, 0.4])
    loss = algorithm.loss(output(divergence), data, algorithm.token_weights(data)).loss
    assert loss.item() == pytest.approx(1.45 / 4.5)


def test_the_teacher_is_asked_for_its_top_k_and_may_write_what_the_student_does_not() -> None:
    assert not Gkd(GkdConfig()).asks_teacher, "its logits are made where the student's are"
    top = Gkd(GkdConfig(top_k=3, on_policy_fraction=0.0))
    assert top.asks_teacher and top.divergence == Divergence(beta=0.5, temperature=1.0, top_k=3)
    assert not top.online and top.needs_responses
    taught = Gkd(GkdConfig(seq_kd=True, on_policy_fraction=0.0))
    assert taught.online and not taught.needs_responses
    assert not Gkd(GkdConfig(on_policy_fraction=1.0)).needs_responses


def test_who_makes_a_steps_responses_depends_on_seed_and_step_alone() -> None:
    algorithm = Gkd(GkdConfig(on_policy_fraction=0.3))
    chosen = [algorithm.samples(0, step) for step in range(1, 2001)]
    assert chosen == [Gkd(GkdConfig(on_policy_fraction=0.3)).samples(0, step) for step in range(1, 2001)]
    assert chosen != [algorithm.samples(1, step) for step in range(1, 2001)]
    # 600 are expected; the standard deviation is sqrt(2000 * 0.3 * 0.7) = 20.5.
    assert 540 < sum(chosen) < 660
    # More steps are sampled with a greater fraction, and never other ones.
    more = Gkd(GkdConfig(on_policy_fraction=0.6))
    assert all(more.samples(0, step) for step in range(1, 2001) if algorithm.samples(0, step))
    assert all(Gkd(GkdConfig(on_policy_fraction=1.0)).samples(0, step) for step in range(1, 100))


def test_gkd_has_no_metrics_of_tokens_that_a_step_does_not_have() -> None:
    def found(version: int) -> set[str]:
        algorithm, data = Gkd(GkdConfig()), batch(versions=torch.full((5,), version))
        return merge([algorithm.loss(output(torch.ones(5)), data, algorithm.token_weights(data)).metrics]).keys()

    always = {"train/loss", "train/divergence_nats", "train/entropy_nats"}
    assert found(OFFLINE_VERSION) == {*always, "train/nll_nats"}
    gaps = {key for key in found(3) if "logprob_gap" in key or "engine_kl" in key}
    assert len(gaps) == 5 and found(3) == always | gaps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 1.1}, "beta must be at most 1, got 1.1"),
        ({"on_policy_fraction": -0.1}, "on_policy_fraction must be at least 0, got -0.1"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"nll_coefficient": -1.0}, "nll_coefficient must be at least 0"),
        ({"nll_coefficient": 0.1, "on_policy_fraction": 1.0}, "nll_coefficient has no effect"),
        ({"seq_kd": True, "on_policy_fraction": 1.0}, "seq_kd has no effect with on_policy_fraction=1"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"rest": Rest.LEFT_OUT}, "rest has no effect with top_k=0, got left_out"),
        ({"temperature": math.nan}, "temperature must be above 0, got nan"),
        ({"temperature": 1e300}, "temperature must be at most 10000.0"),
        ({"nll_coefficient": math.inf}, "nll_coefficient must be at most 10000.0, got inf"),
        ({"divergence_cap": 0.0}, "divergence_cap must be above 0"),
        ({"aggregation": Aggregation.PROMPT_MEAN}, "aggregation prompt_mean is for groups of rollouts"),
    ],
)
def test_gkd_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GkdConfig(**settings)


def advantages(algorithm: PolicyGradient, **fields: Any) -> Tensor:
    """[3] of the sampled tokens; the others' are 0."""
    found = algorithm.train_batch(batch(teacher_logprobs=TEACHER, **fields)).advantages
    assert found[[0, 2]].tolist() == [0.0, 0.0]
    return found[[1, 3, 4]]


def test_on_policy_distillation_is_the_teachers_logprob_over_the_students() -> None:
    algorithm = OnPolicyDistillation(OnPolicyDistillationConfig())
    assert algorithm.needs_teacher_logprobs and algorithm.needs_teacher and not algorithm.needs_rewards
    torch.testing.assert_close(advantages(algorithm), torch.tensor([0.5, -0.25, -2.0]))
    # From the policy before the update where it is not the engine's.
    old = OLD - 0.25
    torch.testing.assert_close(advantages(algorithm, old_logprobs=old), torch.tensor([0.75, 0.0, -1.75]))
    # At ratio one: -(0.5 - 0.25 - 2) / 3; the gradient by logprob is -A / 3.
    data = algorithm.train_batch(batch(teacher_logprobs=TEACHER))
    logprobs = OLD.clone().requires_grad_()
    policy = PolicyOutput(logprobs=logprobs, entropy=torch.ones(5))
    result = algorithm.loss(policy, data, algorithm.token_weights(data))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1.75 / 3, abs=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5, 0.0, 0.25, 2.0]) / 3)
    # The reverse KL of the three: (-0.5 + 0.25 + 2) / 3.
    assert result.metrics["train/teacher_kl_nats"] == Mean(1.75, 3.0)


def test_without_rewards_no_group_is_sampled_again_for_theirs() -> None:
    with pytest.raises(ValueError, match="dynamic_sampling has no effect with reward_coefficient=0"):
        OnPolicyDistillationConfig(group_size=2, dynamic_sampling=DynamicSamplingConfig())


def test_rewards_may_speak_too() -> None:
    config = OnPolicyDistillationConfig(distillation_coefficient=2.0, reward_coefficient=0.1, group_size=2)
    algorithm = OnPolicyDistillation(config)
    assert algorithm.needs_rewards
    # Rewards 1 and 0: 0.5 / (sqrt(0.5) + 1e-6) = 0.7071058 either way.
    unit = 0.5 / (0.5**0.5 + 1e-6)
    expected = torch.tensor([0.1 * unit + 1.0, -0.1 * unit - 0.5, -0.1 * unit - 4.0])
    torch.testing.assert_close(advantages(algorithm), expected)


def test_every_policy_gradient_takes_the_teacher_beside_its_own_advantages() -> None:
    unit = 0.5 / (0.5**0.5 + 1e-6)
    algorithm = Grpo(GrpoConfig(distillation_coefficient=0.5))
    torch.testing.assert_close(advantages(algorithm), torch.tensor([unit + 0.25, -unit - 0.125, -unit - 1.0]))
    # Behind the whitening of REINFORCE++: what is left without the teacher is the same.
    whitened = ReinforcePlusPlus(ReinforcePlusPlusConfig(distillation_coefficient=0.5))
    alone = ReinforcePlusPlus(ReinforcePlusPlusConfig()).train_batch(batch()).advantages[[1, 3, 4]]
    torch.testing.assert_close(advantages(whitened) - alone, torch.tensor([0.25, -0.125, -1.0]))
    assert not Grpo(GrpoConfig()).needs_teacher


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distillation_coefficient": 0.0}, "distillation_coefficient must be above 0, got 0.0"),
        ({"reward_coefficient": -1.0}, "reward_coefficient must be at least 0, got -1.0"),
        ({"reward_coefficient": 1.0}, "at least 2 for on_policy_distillation with reward_coefficient=1, got 1"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
    ],
)
def test_on_policy_distillation_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnPolicyDistillationConfig(**settings)


def test_a_negative_coefficient_is_refused_everywhere() -> None:
    with pytest.raises(ValueError, match="distillation_coefficient must be at least 0, got -0.5"):
        GrpoConfig(distillation_coefficient=-0.5)
