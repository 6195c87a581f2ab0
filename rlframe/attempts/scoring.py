"""Judge: scores rollouts by the reward functions as they finish, from a thread of its own."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence

from rlframe.rewards.config import Per
from rlframe.rewards.runner import RewardRunner
from rlframe.types.rollout import Rollout
from rlframe.types.wait import Wait
from rlframe.utils.errors import RlframeError

CLOSE_S = 5.0
"""Seconds that the reward workers may take to end."""
Unit = Sequence[Rollout]
"""Rollouts that are scored together."""


class Judge:
    """Passes rollouts of an event loop to the reward workers, and their rewards back."""

    def __init__(self, rewards: RewardRunner, loop: asyncio.AbstractEventLoop):
        """Starts the thread. `rewards` belongs to it from then on."""
        self._rewards, self._loop = rewards, loop
        self._inbox: deque[tuple[Unit, Per, asyncio.Future[None]]] = deque()
        self._error: RlframeError | None = None
        """The error that has ended the thread."""
        self._answers: dict[int, asyncio.Future[None]] = {}
        """By the identity of the unit."""
        self._wakes = False
        """Whether the thread is woken in this turn of the loop."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    async def score(self, rollout: Rollout) -> None:
        """Fills what parts per attempt give to `rollout`.

        Raises:
            RlframeError: the reward workers cannot be started, or a reward never works.
        """
        await self._scored([rollout], Per.ATTEMPT)

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Adds what parts per group give to the rollouts of a group, one for each attempt. Raises as `score`."""
        await self._scored(list(rollouts), Per.GROUP)

    def waits(self) -> list[Wait]:
        """Returns how many attempts wait for each reward part. Must be called in the loop."""
        return self._rewards.waits(self._is_awaited)

    def _is_awaited(self, unit: Unit) -> bool:
        answer = self._answers.get(id(unit))
        # The attempt may have run out of time, or have been forgotten.
        return answer is not None and not answer.done()

    async def _scored(self, unit: Unit, per: Per) -> None:
        if self._error:
            raise self._error
        if not unit or not self._rewards.parts(per):
            return
        answer: asyncio.Future[None] = self._loop.create_future()
        self._inbox.append((unit, per, answer))
        if not self._wakes:
            self._wakes = True
            self._loop.call_soon(self._wake)
        await answer

    def _wake(self) -> None:
        # Once for all rollouts of one turn of the loop: a wake costs a system call and a change of threads.
        self._wakes = False
        self._rewards.wake()

    def close(self) -> None:
        """Ends the thread and the reward workers."""
        self._closed = True
        self._rewards.wake()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._submit()
                if scored := [self._answers.pop(id(unit)) for unit in self._rewards.take()]:
                    self._loop.call_soon_threadsafe(settle, scored, None)
        except RlframeError as error:
            self._give_up(error)
        except BaseException as error:  # Whatever ends this thread: nobody else ends the waits for it.
            self._give_up(RlframeError(f"the thread of rewards failed: {error!r}"))
            raise
        finally:
            self._rewards.close()

    def _submit(self) -> None:
        new = [self._inbox.popleft() for _ in range(len(self._inbox))]
        self._answers |= {id(unit): answer for unit, _, answer in new}
        for per in Per:
            if units := [unit for unit, its, _ in new if its is per]:
                self._rewards.submit(units, per)

    def _give_up(self, error: RlframeError) -> None:
        self._error = error
        # In the loop, where nobody begins to wait between the look at the error and the inbox.
        self._loop.call_soon_threadsafe(self._fail_all, error)

    def _fail_all(self, error: RlframeError) -> None:
        settle([*self._answers.values(), *(answer for _, _, answer in self._inbox)], error)


def settle(answers: "Sequence[asyncio.Future[None]]", error: RlframeError | None) -> None:
    """Ends waits, unless whoever waited has given up."""
    for answer in answers:
        if answer.done():
            continue
        if error:
            answer.set_exception(error)
        else:
            answer.set_result(None)
