"""The loop that is to be read: it trains, and its engine samples with the weights that it has trained."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from teaching_loop import TeachingLoop

from rlframe.rollout.transformers.engine import weights_of


@pytest.mark.later
def test_trainer_and_engine_agree_after_every_update() -> None:
    loop = TeachingLoop(100)
    prompts = loop.prompts.evaluation_prompts()[:16]
    # The model half knows arithmetic; greedy answers are the same each time.
    assert 0 < loop.evaluate(prompts) == loop.evaluate(prompts) < 1
    before = {name: parameter.clone() for name, parameter in loop.policy.named_parameters()}
    steps = [loop.step(step, num_prompts=4) for step in (1, 2, 3)]
    # From step 2 on, the engine has sampled with weights that it was given, and the packed pass gives its logprobs.
    assert all(metrics["logprob_gap_nats"] < 1e-4 for metrics in steps)
    assert all(metrics["grad_norm"] > 0 and 0 < metrics["reward"] < 1 for metrics in steps)
    assert loop.engine.gate.version == 3
    trained = weights_of(loop.policy)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in weights_of(loop.engine.model).items())
    assert not any(torch.equal(trained[name], old) for name, old in before.items())
