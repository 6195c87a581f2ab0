"""Judge: scores rollouts by the reward functions as they finish, from a thread of its own."""

import asyncio
import os
import threading
from collections import deque

from rlframe.rewards.runner import RewardRunner
from rlframe.types.rollout import Rollout
from rlframe.utils.errors import RlframeError

CLOSE_S = 5.0
"""Seconds that the reward workers may take to end."""


class Judge:
    """Passes rollouts of an event loop to the reward workers, and their rewards back."""

    def __init__(self, rewards: RewardRunner, loop: asyncio.AbstractEventLoop):
        """Starts the thread. `rewards` belongs to it from then on."""
        self._rewards, self._loop = rewards, loop
        self._inbox: deque[tuple[Rollout, asyncio.Future[None]]] = deque()
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        self._error: RlframeError | None = None
        """The error that has ended the thread."""
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    async def score(self, rollout: Rollout) -> None:
        """Fills the rewards of `rollout`.

        Raises:
            RewardError: the reward workers cannot be started, or a reward never works.
        """
        if self._error:
            raise self._error
        answer: asyncio.Future[None] = self._loop.create_future()
        self._inbox.append((rollout, answer))
        os.write(self._wake, b"x")
        await answer

    def close(self) -> None:
        """Ends the thread and the reward workers."""
        self._closed = True
        os.write(self._wake, b"x")
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._submit()
                for rollout in self._rewards.take(wake=self._wakes):
                    self._loop.call_soon_threadsafe(settle, self._answers.pop(id(rollout)), None)
        except RlframeError as error:
            self._give_up(error)
        finally:
            self._rewards.close()

    def _submit(self) -> None:
        while True:
            try:
                os.read(self._wakes, 1 << 16)
            except BlockingIOError:
                break
        new = [self._inbox.popleft() for _ in range(len(self._inbox))]
        self._answers |= {id(rollout): answer for rollout, answer in new}
        if new:
            self._rewards.submit([rollout for rollout, _ in new])

    def _give_up(self, error: RlframeError) -> None:
        self._error = error
        for answer in [*self._answers.values(), *(answer for _, answer in self._inbox)]:
            self._loop.call_soon_threadsafe(settle, answer, error)


def settle(answer: "asyncio.Future[None]", error: RlframeError | None) -> None:
    """Ends a wait, unless whoever waited has given up."""
    if answer.done():
        return
    if error:
        answer.set_exception(error)
    else:
        answer.set_result(None)
