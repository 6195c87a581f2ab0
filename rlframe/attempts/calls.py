"""Calls of an engine's actor. Requests of one moment share one, and each is answered as soon as its response ends."""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from ray.exceptions import RayError

from rlframe.attempts.engines import Abort, Ask, Batch, EngineLost
from rlframe.types.packed import Packed
from rlframe.types.rollout import Completion, GenerationRequest
from rlframe.utils.errors import RlframeError


class SharedCalls:
    """Sends the requests of one turn of the event loop together. A call costs Ray a millisecond of two processes."""

    def __init__(self, actor: Any):
        """
        Args:
            actor: that of the engine.
        """
        self._actor = actor
        self._waiting: Batch = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Returns the answers to some requests.

        Raises:
            EngineLost: the call has failed.
            RlframeError: the call has ended without all answers.
        """
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Completion]] = [loop.create_future() for _ in requests]
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting += zip(requests, answers, strict=True)
        return list(await asyncio.gather(*answers))

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._call(waiting))
        self._calls.add(task)
        task.add_done_callback(partial(self._ended, waiting))

    async def _call(self, waiting: Batch) -> None:
        requests = [request for request, _ in waiting]
        if len(requests) == 1:
            # A stream costs more than a call.
            self._pass_on(enumerate(await one_call(self._actor, requests)), waiting)
            return
        async for piece in self._actor.generate_each.remote(Packed(requests)):
            self._pass_on(await answer_of(piece), waiting)

    def _ended(self, waiting: Batch, task: asyncio.Task[None]) -> None:
        """Passes whatever has ended a call on to those who have no answer, who would wait for ever."""
        self._calls.discard(task)
        error = None if task.cancelled() else task.exception()
        for _, answer in waiting:
            if answer.done():
                continue
            if task.cancelled():
                answer.cancel()
            elif isinstance(error, EngineLost):
                # Whoever raises an error writes its own way into it.
                answer.set_exception(EngineLost(error.call))
            else:
                answer.set_exception(error or RlframeError("an engine has ended its answers without that of a request"))

    @staticmethod
    def _pass_on(found: Iterable[tuple[int, Completion]], waiting: Batch) -> None:
        for index, completion in found:
            _, answer = waiting[index]
            if not answer.done():
                answer.set_result(completion)


def calls_of(actor: Any, *, max_calls: int) -> Ask:
    """Returns the function that sends requests to an engine's actor.

    Args:
        max_calls: see RolloutEngine.
    """
    return partial(one_call, actor) if max_calls == 1 else SharedCalls(actor).ask


async def one_call(actor: Any, requests: list[GenerationRequest]) -> list[Completion]:
    """Returns the answers to some requests when the last response has ended.

    Raises:
        EngineLost: the call has failed.
    """
    answers: Packed[Completion] = await answer_of(actor.generate.remote(Packed(requests)))
    return answers.objects()


async def answer_of(call: Any) -> Any:
    """Returns the answer of Ray's call.

    Raises:
        EngineLost: the call has failed.
    """
    try:
        return await asyncio.wrap_future(call.future())
    except RayError:
        raise EngineLost([call]) from None


def abort_of(actor: Any) -> Abort:
    """Returns the function that makes an engine's actor abort requests. It does not wait, and an engine that is dead
    has nothing to abort."""

    def abort(names: list[str]) -> None:
        actor.abort.remote(names)

    return abort
