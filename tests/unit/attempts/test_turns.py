"""Single attempts whose sessions end one after the other."""

import asyncio

import pytest

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.dialogue import single_turn
from rlframe.attempts.sessions.calls import SessionFailed, Trouble
from rlframe.attempts.turns import DONE, Hosted, Progress, Sides, Task, Turns, leave
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, SamplingParams


@pytest.mark.parametrize("answers_again", [False, True])
def test_what_was_sampled_before_a_retry_is_not_trained_on(answers_again: bool) -> None:
    """A session that ends on another's account, after a response, is followed by one that fails, with or without."""
    sessions = 0

    async def host(hosted: Hosted) -> Verdict:
        nonlocal sessions
        sessions += 1
        if sessions == 1 or answers_again:
            ids = [10 * sessions] * 3
            hosted.rollout.append(
                Completion(token_ids=ids, logprobs=[-0.5] * 3, versions=[0] * 3, finish_reason=FinishReason.STOP)
            )
        raise SessionFailed(Trouble.NEIGHBOUR if sessions == 1 else Trouble.RAISED, "ended")

    async def sample(request: GenerationRequest) -> Completion:
        raise AssertionError(f"the host has no question, got {request}")

    sides = Sides(decode=str, open=single_turn, score=leave, host=host)
    turns = Turns(sides, EnvironmentConfig(name="x:Y", on_failure=Verdict.TRAIN), run_seed=0, max_positions=100)
    prompt = Prompt(id="p", messages=(), text="", input=ModelInput((1, 2)))
    task = Task(group=Group.begin("0", prompt, 1), sampling=SamplingParams(max_tokens=3), step=1).begun()
    ((rollout, progress),) = task.pairs()
    assert isinstance(progress, Progress)
    end = asyncio.run(turns.run(task, rollout, progress, sample))
    assert sessions == 2
    assert end == (DONE if answers_again else DropReason.FAILED)
    assert rollout.token_ids.tolist() == ([1, 2, 20, 20, 20] if answers_again else [1, 2])
