"""Environments that answer at once, and those that answer later: what attempts and engines see of them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.dialogue import Answer
from rlframe.attempts.runner import Ended, News, Runner
from rlframe.attempts.sessions.calls import SessionFailed, Trouble
from rlframe.attempts.turns import Event, Sides, Task, WaitsFor
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.ops.packing import pack
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams
from tests.local_attempts import LocalAttempts, Observing, opening
from tests.unit.attempts.simulated.clock import simulated

TURNS = 3


def attempted(
    observe: Callable[[Rollout], Any], *, count: int, attempt_timeout_s: float = 1e6
) -> tuple[Ended, list[int], float]:
    """The group of `count` attempts, the number of requests of each of the engine's calls, and the seconds it took."""
    calls: list[int] = []

    async def ask(requests: list[GenerationRequest]) -> list[Completion]:
        calls.append(len(requests))
        return [
            Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP) for _ in requests
        ]

    attempts = LocalAttempts([ask], lambda rollout: None, observe=observe, attempt_timeout_s=attempt_timeout_s)
    group = Group.begin("0", Prompt(id="p", text="", input=ModelInput((1, 2))), count)
    (ended,) = attempts.run([attempts.task(group, step=1)]).values()
    return ended, calls, attempts.now_s


def at_once(rollout: Rollout) -> list[int] | None:
    return [5] if len(rollout.spans) < TURNS else None


async def later(rollout: Rollout) -> list[int] | None:
    await asyncio.sleep(0.1)
    return at_once(rollout)


@pytest.mark.parametrize("observe", [at_once, later])
def test_attempts_are_the_same_whenever_the_environment_answers(observe: Callable[[Rollout], Any]) -> None:
    ended, _, _ = attempted(observe, count=2)
    assert len(ended.group.rollouts) == 2
    for rollout in ended.group.rollouts:
        assert rollout.token_ids.tolist() == [1, 2, 9, 5, 9, 5, 9]
        assert rollout.loss_mask.tolist() == [False, False, True, False, True, False, True]
        assert rollout.versions.tolist() == [-1, -1, 0, -1, 0, -1, 0]


def test_next_turns_share_a_call_if_the_environment_answers_at_once() -> None:
    assert attempted(at_once, count=8)[1] == [8] * TURNS


def test_attempts_wait_for_their_environments_at_the_same_time() -> None:
    ended, _, took_s = attempted(later, count=200)
    assert len(ended.group.rollouts) == 200
    # One after the other they would take 60 s.
    assert took_s == pytest.approx(TURNS * 0.1)


def test_an_environment_that_never_answers_ends_its_attempt_only() -> None:
    async def observe(rollout: Rollout) -> list[int] | None:
        await asyncio.sleep(3600 if rollout.sample_index == 1 else 0)
        return None

    ended, _, _ = attempted(observe, count=3, attempt_timeout_s=0.2)
    assert [rollout.sample_index for rollout in ended.group.rollouts] == [0, 2]
    assert list(ended.lost) == [DropReason.TIMED_OUT]


def test_the_limit_of_a_tool_is_not_that_of_the_attempt() -> None:
    async def observe(rollout: Rollout) -> list[int] | None:
        if rollout.sample_index == 1:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(3600)
        return None

    ended, _, _ = attempted(observe, count=3)
    assert [rollout.sample_index for rollout in ended.group.rollouts] == [0, 2]
    assert list(ended.lost) == [DropReason.FAILED]


def test_an_attempt_that_waits_for_its_environment_or_its_reward_goes_on_from_there() -> None:
    """Which of the two it waits for when it is looked at depends on the attempt; none samples a response twice."""
    asked: list[int] = []

    async def ask(requests: list[GenerationRequest]) -> list[Completion]:
        asked.extend(len(request.input) for request in requests)
        return [
            Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP) for _ in requests
        ]

    async def never(rollout: Rollout) -> None:
        await asyncio.sleep(3600)

    async def observe(rollout: Rollout) -> list[int] | None:
        if rollout.sample_index == 2:
            raise SessionFailed(Trouble.RAISED, "no such file")
        await asyncio.sleep(3600 * rollout.sample_index)
        return None

    async def snapshot() -> list[Task]:
        sides = Sides(decode=str, open=opening(observe), score=never)
        train = EnvironmentConfig(on_failure=Verdict.TRAIN)
        runner = Runner(
            [ask], sides, run_seed=0, max_calls=1, max_positions=64, attempt_timeout_s=1e6, environment=train
        )
        group = Group.begin("0", Prompt(id="p", text="", input=ModelInput((1, 2))), 3)
        runner.start([Task(group=group, sampling=SamplingParams(max_tokens=4), step=1)], version=0)
        await asyncio.sleep(0.1)
        runner.interrupt()
        return await runner.snapshot()

    tasks = simulated(snapshot())
    attempts = LocalAttempts([ask], lambda rollout: None, observe=at_once)
    attempts.start(tasks)
    (ended,) = attempts.next()
    # The first was over but for its reward, whatever the environment says now, and the last one by its failure.
    last = ended.group.rollouts[2]
    assert [each.token_ids.tolist() for each in ended.group.rollouts] == [[1, 2, 9], [1, 2, 9, 5, 9, 5, 9], [1, 2, 9]]
    assert asked == [2, 2, 2, 4, 6] and last.num_turns == len(last.records) == 1


def test_an_attempt_whose_environment_begins_otherwise_begins_anew_also_before_its_first_answer() -> None:
    async def ask(requests: list[GenerationRequest]) -> list[Completion]:
        return [
            Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP) for _ in requests
        ]

    async def otherwise(rollout: Rollout, **named: Any) -> Observing:
        rollout.restart(ModelInput((1, 2, 3)))
        return Observing(lambda rollout: [5] if len(rollout.turns) < 2 else None)

    async def run() -> News:
        prompt = Prompt(id="p", text="", input=ModelInput((1, 2)))
        task = Task(group=Group.begin("0", prompt, 1), sampling=SamplingParams(max_tokens=4), step=1).begun()
        task.group.rollouts[0].append((await ask([None]))[0])  # type: ignore[list-item]
        task.progress[0].waits_for = WaitsFor.ENVIRONMENT

        async def score(rollout: Rollout) -> None:
            pass

        sides = Sides(decode=str, open=otherwise, score=score)
        runner = Runner([ask], sides, run_seed=0, max_calls=1, max_positions=64, attempt_timeout_s=1e6)
        runner.start([task], version=0)
        return await runner.news(1.0)

    news = simulated(run())
    (ended,) = news.ended
    assert not ended.lost and news.events == {Event.BEGUN_ANEW: 1}
    assert [each.token_ids.tolist() for each in ended.group.rollouts] == [[1, 2, 3, 9, 5, 9]]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ((), None),
        ((5,), [[1, 2, 9]]),
        ("fork", [[1, 2, 9]]),
    ],
)
@pytest.mark.parametrize("sampled", [(), (8, 8)])
def test_half_a_response_is_not_judged_where_the_environment_of_a_resumed_attempt_fails(
    before: Any, expected: list[list[int]] | None, sampled: tuple[int, ...]
) -> None:
    judged: list[Rollout] = []

    async def broken(rollout: Rollout, **named: Any) -> Observing:
        raise SessionFailed(Trouble.RAISED, "no session left")

    async def score(rollout: Rollout) -> None:
        judged.append(rollout)

    async def never(requests: list[GenerationRequest]) -> list[Completion]:
        raise AssertionError("nothing is sampled")

    def said(tokens: Sequence[int], at: int, reason: FinishReason) -> Completion:
        count = len(tokens)
        routes = np.zeros((at + count - 1, 1, 1), np.uint8)
        return Completion(
            token_ids=tokens, logprobs=[-1.0] * count, versions=[0] * count, finish_reason=reason, routes=routes
        )

    async def run() -> News:
        prompt = Prompt(id="p", text="", input=ModelInput((1, 2)))
        task = Task(group=Group.begin("0", prompt, 1), sampling=SamplingParams(max_tokens=4), step=1).begun()
        (rollout,), (progress,) = task.group.rollouts, task.progress
        if before:
            rollout.append(said([9], 2, FinishReason.STOP))
            rollout.text = "[9]"
            Answer(messages=[{"role": "assistant", "content": "9"}], reward=1.0).note(rollout)
            if before == "fork":
                task.fork(rollout, ModelInput((1, 2, 6)))
            else:
                rollout.observe(before)
            progress.turn = 1
        if sampled:
            rollout.append(said(sampled, rollout.num_tokens, FinishReason.ABORT))
            rollout.text, progress.begun = str(list(sampled)), len(sampled)
        sides = Sides(decode=str, open=broken, score=score)
        runner = Runner(
            [never],
            sides,
            run_seed=0,
            max_calls=1,
            max_positions=64,
            attempt_timeout_s=1e6,
            environment=EnvironmentConfig(on_failure=Verdict.TRAIN),
        )
        runner.start([task], version=0)
        return await runner.news(1.0)

    (ended,) = simulated(run()).ended
    if expected is None:
        assert list(ended.lost) == [DropReason.FAILED] and not judged
        return
    assert not ended.lost and [each.token_ids.tolist() for each in ended.group.rollouts] == expected
    (rollout,) = judged
    assert rollout.finish_reason is FinishReason.STOP and rollout.text == "[9]" and rollout.ending == "raised"
    assert rollout.num_turns == len(rollout.records) == 1 and rollout.total_reward == 1.0
    batch = pack([ended.group])
    assert batch.routes is not None and len(rollout.messages) == 1
