"""Attempts of agents: each has an endpoint and a session, and is over when its agent has ended."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rlframe.attempts.endpoint.desk import Desk
from rlframe.attempts.endpoint.server import Server
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.attempts.sessions.calls import SessionFailed, Trouble
from rlframe.attempts.sessions.pool import Session, SessionPool
from rlframe.attempts.turns import ALONE_AFTER, DONE, ENVIRONMENT, Hosted
from rlframe.attempts.waits import Waits
from rlframe.environments.base import Step
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.types.rollout import FinishReason
from rlframe.types.wait import Wait

LOOKS = 4
"""Number of times within `environment.step_timeout_s` that an agent is looked at."""
LONGEST_LOOK_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Runs agents, one for each attempt."""

    pool: SessionPool
    server: Server
    language: Renderer
    decode: Callable[[list[int]], str]
    """Returns the text of tokens, special tokens left out."""
    config: EnvironmentConfig
    places: asyncio.Semaphore
    """Held by each attempt whose agent runs."""
    stop_fault: str = ""
    """See Desk."""
    _queue: Waits = field(default_factory=Waits)
    """Attempts that wait for a place."""
    _desks: set[Desk] = field(default_factory=set)
    """The desks of attempts whose agents run."""

    def waits(self) -> list[Wait]:
        """Returns how many attempts wait for their agents, and for a place."""
        name, idle_s = self.config.name, [desk.idle_s for desk in self._desks if desk.is_idle]
        limit = f"it may be without a call for {self.config.step_timeout_s:g} s: environment.step_timeout_s"
        idle = Wait(number=len(idle_s), what=f"the agent {name}", longest_s=max(idle_s, default=0.0), limit=limit)
        at_once = f"{len(self._desks)} run at present"
        return [*([idle] if idle_s else []), *self._queue.told(f"the end of another agent {name}", at_once)]

    async def attempt(self, hosted: Hosted) -> Verdict:
        """See Host."""
        with self._queue.one():
            await self.places.acquire()
        try:
            return await self._attempt(hosted)
        finally:
            self.places.release()

    async def _attempt(self, hosted: Hosted) -> Verdict:
        most, fault = self.config.max_turns, self.stop_fault
        desk = Desk(hosted, self.language, self.decode, max_calls=most, stop_fault=fault)
        number, endpoint = await self.server.open(desk, seed=hosted.seed(ENVIRONMENT))
        self._desks.add(desk)
        is_over, unclosed = False, None
        try:
            session = await self.pool.open(
                hosted.rollout.prompt, seed=endpoint.seed, alone=hosted.progress.neighbours >= ALONE_AFTER
            )
            try:
                await session.run(endpoint)
                desk.begin()
                step = await self._until_over(session, desk)
                # The last call of an agent that has ended is answered, or nobody waits for it.
                is_over = True
                await session.close()
            finally:
                if not is_over:
                    session.abandon()
        except SessionFailed as failure:
            if failure.trouble is Trouble.NEIGHBOUR or (desk.limit is None and not is_over):
                raise
            if is_over:
                unclosed = failure
            else:
                # It did not take the refusal well.
                step = Step(done=True, verdict=self.config.on_limit)
        finally:
            self._desks.discard(desk)
            self.server.close(number)
            desk.close()
        verdict = self._judged(hosted, desk, step)
        if unclosed:
            # What it ended with is noted: environment.on_failure may let it be judged.
            raise unclosed
        return verdict

    async def _until_over(self, session: Session, desk: Desk) -> Step:
        """Returns how an agent has ended.

        Raises:
            SessionFailed: it failed, or was for too long without a call.
        """
        limit_s = self.config.step_timeout_s
        wait_s = min(limit_s / LOOKS, LONGEST_LOOK_S)
        while True:
            look = asyncio.get_running_loop().create_task(session.look(wait_s=wait_s))
            try:
                await asyncio.wait([look, desk.broken], return_when=asyncio.FIRST_COMPLETED)
                if desk.broken.done():
                    desk.broken.result()
                step = await look
            finally:
                look.cancel()
            if step is not None:
                return step
            if desk.idle_s > limit_s:
                why = f"the agent was without a call for longer than environment.step_timeout_s={limit_s:g}"
                raise SessionFailed(Trouble.TOOK_TOO_LONG, why)

    def _judged(self, hosted: Hosted, desk: Desk, step: Step) -> Verdict:
        """Returns the verdict on an attempt that is over, after noting its reward."""
        rollout = hosted.rollout
        if desk.limit is not None:
            rollout.finish_reason = FinishReason.LENGTH
        elif not desk.was_answered:
            raise SessionFailed(Trouble.NEVER_CALLED, "the agent ended without a response of the policy")
        rollout.ending = str(desk.limit) if desk.limit else DONE
        rollout.numbers = {**rollout.numbers, **step.metrics}
        if step.reward and desk.was_answered:
            rollout.credit(step.reward)
            *others, last = rollout.records
            rollout.records = (*others, replace(last, reward=step.reward))
        return step.verdict
