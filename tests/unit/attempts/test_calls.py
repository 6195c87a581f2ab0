import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rlframe.attempts.calls import SharedCalls
from rlframe.attempts.engines import EngineLost
from rlframe.types.input import ModelInput
from rlframe.types.packed import Packed
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, SamplingParams

REQUESTS = [GenerationRequest(input=ModelInput((1,)), sampling=SamplingParams(), seed=seed) for seed in range(4)]


def completion(request: GenerationRequest) -> Completion:
    """Whose token is the request's seed."""
    return Completion(token_ids=[request.seed], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)


def call(result: Any) -> Any:
    """As Ray's reference to an answer."""
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return SimpleNamespace(future=lambda: future)


class Actor:
    """An engine's actor, whose responses end from the last to the first. It dies before that of request `dies_at`."""

    def __init__(self, dies_at: int | None = None):
        self.calls: list[tuple[str, list[int]]] = []
        self.dies_at = dies_at
        self.generate, self.generate_each = SimpleNamespace(remote=self.one), SimpleNamespace(remote=self.each)

    def one(self, packed: Packed[GenerationRequest]) -> Any:
        requests = packed.objects()
        self.calls.append(("generate", [each.seed for each in requests]))
        return call(Packed(list(map(completion, requests))))

    async def each(self, packed: Packed[GenerationRequest]) -> AsyncIterator[Any]:
        requests = packed.objects()
        self.calls.append(("generate_each", [each.seed for each in requests]))
        for index in reversed(range(len(requests))):
            await asyncio.sleep(0)
            yield call(RayActorError() if index == self.dies_at else [(index, completion(requests[index]))])


async def ask(actor: Actor, requests: list[GenerationRequest], order: list[int]) -> list[int | EngineLost]:
    """The tokens by request; `order` becomes that in which the answers came."""
    calls = SharedCalls(actor)

    async def one(request: GenerationRequest) -> int:
        (answer,) = await calls.ask([request])
        order.append(request.seed)
        return int(answer.token_ids[0])

    return await asyncio.gather(*map(one, requests), return_exceptions=True)


def test_requests_of_one_moment_share_a_call_and_are_answered_as_they_end():
    actor, order = Actor(), []
    assert asyncio.run(ask(actor, REQUESTS, order)) == [0, 1, 2, 3]
    assert actor.calls == [("generate_each", [0, 1, 2, 3])]
    assert order == [3, 2, 1, 0]


def test_a_single_request_has_a_call_that_is_no_stream():
    actor = Actor()
    assert asyncio.run(ask(actor, REQUESTS[:1], [])) == [0]
    assert actor.calls == [("generate", [0])]


def test_a_death_loses_the_requests_that_have_no_answer():
    found = asyncio.run(ask(Actor(dies_at=1), REQUESTS, []))
    assert found[2:] == [2, 3] and all(isinstance(each, EngineLost) for each in found[:2])


def test_nobody_waits_for_a_call_that_has_ended_otherwise():
    class Faulty(Actor):
        """Ends its answers early, with an error or without one."""

        def __init__(self, error: Exception | None):
            super().__init__()
            self.error = error

        async def each(self, packed: Packed[GenerationRequest]) -> AsyncIterator[Any]:
            yield call([(0, completion(packed.objects()[0]))])
            if self.error:
                raise self.error

    broken = asyncio.run(asyncio.wait_for(ask(Faulty(ValueError("not a message")), REQUESTS, []), 30))
    assert broken[0] == 0 and [repr(each) for each in broken[1:]] == 3 * ["ValueError('not a message')"]
    short = asyncio.run(asyncio.wait_for(ask(Faulty(None), REQUESTS, []), 30))
    assert short[0] == 0 and all("without that of a request" in str(each) for each in short[1:])


def test_an_answer_that_nobody_waits_for_any_more_is_dropped():
    async def given_up() -> list[Completion]:
        calls = SharedCalls(Actor())
        waits = [asyncio.create_task(calls.ask([request])) for request in REQUESTS[:2]]
        await asyncio.sleep(0)
        waits[1].cancel()
        return await waits[0]

    assert asyncio.run(given_up())[0].token_ids.tolist() == [0]


@pytest.mark.parametrize("count", [1, 3])
def test_many_requests_of_one_ask_keep_their_order(count: int):
    answers = asyncio.run(SharedCalls(Actor()).ask(REQUESTS[:count]))
    assert [each.token_ids.tolist() for each in answers] == [[each.seed] for each in REQUESTS[:count]]
