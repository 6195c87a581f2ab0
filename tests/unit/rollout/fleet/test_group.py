from dataclasses import replace

import numpy as np
import pytest

from rlframe.cluster.config import Device
from rlframe.models.config import ModelConfig
from rlframe.rollout.base.config import EngineDtype
from rlframe.rollout.fleet.group import max_positions
from rlframe.rollout.fleet.worker import RolloutSetup
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, Rollout, Span


def test_a_rollout_of_two_turns_lines_up():
    rollout = Rollout.begin(Prompt(id="a", text="", input=ModelInput((7, 8))), 1)
    stop = FinishReason.STOP
    # A weight sync came between the two tokens of the first response.
    first = {"versions": [3, 4], "routes": np.array([[[1, 2]], [[3, 4]], [[5, 6]]])}
    rollout.append(Completion(token_ids=[5, 2], logprobs=[-0.1, -0.3], finish_reason=stop, **first))
    rollout.observe([9])
    # The engine has computed the first turn anew, and says of it what it came to now.
    second = {"versions": [4], "routes": np.array([[[0, 0]], [[0, 0]], [[0, 0]], [[7, 8]], [[9, 10]]])}
    rollout.append(Completion(token_ids=[6], logprobs=[-0.2], finish_reason=FinishReason.LENGTH, **second))
    assert rollout.token_ids.tolist() == [7, 8, 5, 2, 9, 6]
    assert rollout.loss_mask.tolist() == [False, False, True, True, False, True]
    assert rollout.rollout_logprobs.tolist() == pytest.approx([0.0, 0.0, -0.1, -0.3, 0.0, -0.2])
    assert rollout.versions.tolist() == [-1, -1, 3, 4, -1, 4]
    assert rollout.spans == [
        Span(version=3, start=2, end=3),
        Span(version=4, start=3, end=4),
        Span(version=4, start=5, end=6),
    ]
    # Tokens 7 8 5 as they were sampled; 2 and 9, which the second turn has sent to experts first.
    assert rollout.routes is not None
    assert rollout.routes[:, 0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.sample_index == 1


def test_engines_take_sequences_up_to_their_own_limit_below_the_models_positions():
    """Attempts of several turns end there, as the engine would refuse the request."""
    setup = RolloutSetup(
        rollout=VllmConfig(max_model_len=96),
        model=ModelConfig(path="qwen3_moe_tiny"),
        dtype=EngineDtype.FLOAT32,
        device=Device.CPU,
        seed=0,
    )
    assert max_positions(setup) == 96
    assert max_positions(replace(setup, rollout=VllmConfig())) == 2048
