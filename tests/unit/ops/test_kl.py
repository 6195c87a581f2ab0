"""KL estimators against numbers worked by hand."""

import math

import pytest
import torch

from rlframe.ops.kl import KlEstimator, kl_per_token, next_coefficient

LOG2 = math.log(2)
# Policy 1/2 against reference 1/4, 1/4 against 1/2, and equal: d = log 2, -log 2, 0.
LOGPROBS = torch.tensor([-LOG2, -2 * LOG2, -1.0])
REFERENCE = torch.tensor([-2 * LOG2, -LOG2, -1.0])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (KlEstimator.K1, [LOG2, -LOG2, 0.0]),
        # 0.6931^2 / 2
        (KlEstimator.K2, [0.240227, 0.240227, 0.0]),
        # 1/2 + 0.693147 - 1 and 2 - 0.693147 - 1
        (KlEstimator.K3, [0.193147, 0.306853, 0.0]),
    ],
)
def test_estimators_have_their_closed_forms(estimator: KlEstimator, expected: list[float]) -> None:
    torch.testing.assert_close(kl_per_token(LOGPROBS, REFERENCE, estimator), torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "slopes"),
    # Derivatives by the policy's logprob: 1; d; 1 - exp(-d).
    [(KlEstimator.K1, [1, 1, 1]), (KlEstimator.K2, [LOG2, -LOG2, 0]), (KlEstimator.K3, [0.5, -1, 0])],
)
def test_the_gradient_reaches_the_policy_only(estimator: KlEstimator, slopes: list[float]) -> None:
    logprobs, reference = LOGPROBS.clone().requires_grad_(), REFERENCE.clone().requires_grad_()
    kl_per_token(logprobs, reference.detach(), estimator).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor(slopes, dtype=torch.float32))
    assert reference.grad is None


def test_k3_averages_to_the_kl_under_the_policy() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy / reference).log()).sum()
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        torch.testing.assert_close((policy * kl_per_token(policy.log(), reference.log(), estimator)).sum(), exact)


def test_k3_stays_finite_and_never_pushes_away_from_the_reference() -> None:
    logprobs = torch.tensor([-200.0, -30.0, -0.5], requires_grad=True)
    kl = kl_per_token(logprobs, torch.tensor([-1.0, -1.0, -90.0]), KlEstimator.K3)
    kl.sum().backward()
    # Below d = -20 it is the constant e^20 - 20 - 1; far above, e^-89.5 + 89.5 - 1.
    torch.testing.assert_close(kl.detach(), torch.tensor([485165174.4, 485165174.4, 88.5]))
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0, 1.0]


def test_a_cap_bounds_k3_and_its_gradient_in_nats() -> None:
    logprobs = torch.tensor([-4.0, -1.0, 3.0], requires_grad=True)
    zero = torch.zeros(3)
    kl = kl_per_token(logprobs, zero, KlEstimator.K3, cap=10.0)
    kl.sum().backward()
    # e^4 - 5 = 49.6 counts as 10, without gradient; e^1 - 2 and e^-3 + 2 do not, with 1 - e^-d.
    torch.testing.assert_close(kl.detach(), torch.tensor([10.0, 0.718282, 2.049787]))
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.718282, 0.950213]))
    # The gradient of k3_plus is that of k2, d, which the cap does not reach; k3_weighted's ratio, e^-4 and e^-1 and e^3
    # to an old policy of 0, is multiplied with what is capped.
    logprobs.grad = None
    kl_per_token(logprobs, zero, KlEstimator.K3_PLUS, cap=10.0).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-4.0, -1.0, 3.0]))
    weighted = kl_per_token(logprobs, zero, KlEstimator.K3_WEIGHTED, old_logprobs=zero, cap=10.0)
    torch.testing.assert_close(weighted, torch.tensor([0.183156, 0.264241, 41.171]), atol=1e-3, rtol=0)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    kl = kl_per_token(logprobs, REFERENCE, KlEstimator.K3_PLUS)
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), torch.tensor([0.193147, 0.306853, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(logprobs.grad, torch.tensor([LOG2, -LOG2, 0.0]))


def test_weighted_k3_is_the_kl_and_its_gradient_for_tokens_of_an_old_policy() -> None:
    # Exact expectations over a vocabulary of three under the old policy: only k3_weighted has both right.
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    old, reference = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.2, 0.2, 0.6])
    policy = torch.log_softmax(logits, dim=0)
    exact = (policy.exp() * (policy - reference.log())).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimates = kl_per_token(policy, reference.log(), KlEstimator.K3_WEIGHTED, old_logprobs=old.log())
    mean = (old * estimates).sum()
    (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
    torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(gradient, expected)
    unweighted = (old * kl_per_token(policy, reference.log(), KlEstimator.K3)).sum()
    assert abs(unweighted - exact) > 0.01


def test_the_coefficient_follows_the_relative_error_of_the_kl() -> None:
    # (0.11 - 0.1) / 0.1 = 0.1, times gain 0.5; an error of 9 counts as 0.2; a KL of 0 as -0.2.
    assert next_coefficient(2.0, 0.11, target=0.1, gain=0.5) == pytest.approx(2.0 * 1.05)
    assert next_coefficient(2.0, 1.0, target=0.1, gain=0.1) == pytest.approx(2.0 * 1.02)
    assert next_coefficient(2.0, 0.0, target=0.1, gain=0.1) == pytest.approx(2.0 * 0.98)
