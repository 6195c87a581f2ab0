"""Judges at work: calls of rewards that wait for others, many at a time, in the event loop of a thread."""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from rlframe.processes.work import Failed, TaskFailed
from rlframe.processes.worker import described
from rlframe.rewards.base import BEGIN, Attempt, Judging, Scores, Unanswered, build_reward
from rlframe.rewards.config import RewardTerm
from rlframe.rewards.scoring import checked

logger = logging.getLogger(__name__)
CLOSE_S = 5.0
"""Seconds that judges may take to release what they hold."""
TIMED_OUT = "timed_out"
"""Trouble of a call that took too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of one call."""

    outcomes: Sequence[Scores] | Failed
    """The scores of each attempt, or the failure of all."""
    trouble: str = ""
    """A word for why the judge gave no score of its own. Empty if it did."""


class Judges:
    """The judges of a run. Must be closed."""

    def __init__(self, parts: Mapping[str, RewardTerm], *, wake: Callable[[], None]):
        """
        Args:
            parts: their parts, all of which are Judging.
            wake: called, from another thread, when there is something to take.
        """
        self.names = frozenset(parts)
        self._parts, self._wake = parts, wake
        self._numbers = count(1)
        self._done: deque[tuple[int, Answer]] = deque()
        self._odd: Counter[str] = Counter()
        """Number of calls without a score, by part."""
        self._judges: dict[str, Judging] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}
        for name, part in parts.items():
            judge = build_reward(part, key=f"reward.parts.{name}")
            assert isinstance(judge, Judging)
            self._judges[name], self._turns[name] = judge, asyncio.Semaphore(judge.at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    def submit(self, name: str, attempts: Sequence[Attempt]) -> int:
        """Begins a call. Returns its number, from 1 on."""
        number = next(self._numbers)
        asyncio.run_coroutine_threadsafe(self._call(number, name, attempts), self._loop)
        return number

    def take(self) -> dict[int, Answer]:
        """Returns what came of calls that ended since the last time, by number."""
        return dict(self._done.popleft() for _ in range(len(self._done)))

    def close(self) -> None:
        """Ends all calls. A second call does nothing."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._release(), self._loop)
        self._thread.join(CLOSE_S)

    async def _release(self) -> None:
        mine = asyncio.current_task()
        calls = [task for task in asyncio.all_tasks() if task is not mine]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls, timeout=CLOSE_S / 2) if calls else None
        await asyncio.gather(*(judge.close() for judge in self._judges.values()), return_exceptions=True)
        self._loop.stop()

    async def _call(self, number: int, name: str, attempts: Sequence[Attempt]) -> None:
        async with self._turns[name]:
            answer = await self._answer(name, attempts)
        if answer.trouble:
            self._odd[name] += 1
            if self._odd[name] & (self._odd[name] - 1) == 0 and not isinstance(answer.outcomes, Failed):  # 1, 2, 4, ...
                text = "reward.parts.%s has %s for the time number %d; reward/%s_%s_fraction counts on"
                logger.warning(text, name, answer.trouble, self._odd[name], name, answer.trouble)
        self._done.append((number, answer))
        self._wake()

    async def _answer(self, name: str, attempts: Sequence[Attempt]) -> Answer:
        """Returns what comes of a call, however it ends."""
        judge, limit_s = self._judges[name], self._parts[name].timeout_s
        limit = asyncio.timeout(None if judge.begins else limit_s)

        def begin() -> None:
            if limit_s is not None and limit.when() is None:
                limit.reschedule(self._loop.time() + limit_s)

        # Each call is a task of its own.
        BEGIN.set(begin)
        try:
            async with limit:
                return Answer(outcomes=checked(await judge.judge(attempts, self._parts[name].per), attempts))
        except Unanswered as error:
            found = error
        except TimeoutError as error:
            if not limit.expired():
                return Answer(outcomes=Failed(described(error)), trouble="failed")
            found = judge.without(TIMED_OUT, f"took longer than timeout_s={limit_s:g}", attempts)
        except TaskFailed as error:
            return Answer(outcomes=Failed(str(error)), trouble="failed")
        except Exception as error:  # One call, like a reward that raises.
            return Answer(outcomes=Failed(described(error)), trouble="failed")
        scores = Failed(str(found)) if found.scores is None else checked(found.scores, attempts)
        return Answer(outcomes=scores, trouble=found.trouble)
