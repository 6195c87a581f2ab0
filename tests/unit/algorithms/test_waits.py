"""Losses of online algorithms read no number that a GPU has, for which the host would wait in every micro-batch."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import rlframe.algorithms
from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Output, PolicyOutput
from tests.waits import Waits

MODULES = [
    importlib.import_module(f"rlframe.algorithms.{found.name}")
    for found in pkgutil.iter_modules(rlframe.algorithms.__path__)
]
ONLINE = [
    module
    for module in MODULES
    if issubclass(getattr(module, "COMPONENT", object), OnlineAlgorithm) and module.COMPONENT.output is Output.TOKENS
]
LENGTHS = [3, 4, 2, 5]


def batch() -> TrainBatch:
    """Two groups of two."""
    tokens, numbers = sum(LENGTHS), torch.Generator().manual_seed(0)

    def nats() -> torch.Tensor:
        return torch.rand(tokens, generator=numbers) - 3

    return TrainBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        lengths=torch.tensor(LENGTHS),
        loss_mask=torch.rand(tokens, generator=numbers) > 0.3,
        rollout_logprobs=nats(),
        group=torch.tensor([0, 0, 1, 1]),
        rewards=torch.tensor([0.0, 1.0, 1.0, 0.0]),
        versions=torch.zeros(tokens, dtype=torch.int64),
        old_logprobs=nats(),
        reference_logprobs=nats(),
        teacher_logprobs=nats(),
        advantages=torch.randn(tokens, generator=numbers),
        chosen=torch.rand(tokens, generator=numbers) > 0.5,
    )


@pytest.mark.parametrize("module", ONLINE, ids=lambda module: module.__name__.rsplit(".", 1)[1])
def test_no_loss_waits(module: Any) -> None:
    algorithm, trained = module.COMPONENT(module.CONFIG()), batch()
    weights, logprobs = algorithm.token_weights(trained), trained.rollout_logprobs.clone().requires_grad_()
    with Waits() as waits:
        output = algorithm.loss(PolicyOutput(logprobs=logprobs, entropy=-logprobs.detach()), trained, weights)
        output.loss.backward()
    assert logprobs.grad is not None and waits.found == []


def test_the_losses_are_those_of_all_online_algorithms_but_distillation_of_distributions() -> None:
    names = {module.__name__.rsplit(".", 1)[1] for module in ONLINE}
    assert {"grpo", "ppo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "clip_cov", "kl_cov"} <= names
