"""The dialogue of an attempt with a session: messages there, tokens here."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlframe.attempts.dialogue import Answer
from rlframe.attempts.rendering.renderer import Ids, Renderer
from rlframe.attempts.sessions.calls import Opening, SessionFailed, Trouble
from rlframe.attempts.sessions.pool import Session, SessionPool
from rlframe.environments.base import Turn
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.rollout import FinishReason, Rollout
from rlframe.utils.errors import DataError, SettingError


class SessionDialogue:
    """A dialogue with a session of the environment."""

    def __init__(self, session: Session, language: Renderer):
        self._session, self._language = session, language
        self._tools = session.opening.tools
        self.opening: Opening = session.opening
        self._is_over = False

    async def respond(self, rollout: Rollout) -> Answer:
        """See Dialogue."""
        start, end = rollout.turns[-1]
        sampled, before = rollout.token_ids[start:end].tolist(), rollout.messages
        reply = self._language.parse(sampled, self._tools, prompt=rollout.token_ids[:start].tolist())
        if rollout.finish_reason is FinishReason.LENGTH:
            rollout.messages = [*before, reply.message]
            return Answer(cut_off=True)
        turn = Turn(
            message=reply.message,
            text=rollout.text,
            finish_reason=rollout.finish_reason,
            malformed=tuple(each.why for each in reply.malformed),
        )
        step = await self._session.step(turn)
        rollout.messages = [*before, reply.message, *step.messages]
        rollout.numbers = {**rollout.numbers, **step.metrics}
        if step.reward:
            rollout.credit(step.reward)
        if step.is_over:
            return Answer(verdict=step.verdict)
        try:
            following = self._language.follow(before, sampled, step.messages, self._tools)
        except (DataError, SettingError) as error:
            raise SessionFailed(Trouble.NOT_RENDERED, str(error)) from None
        return Answer(token_ids=following.tolist())

    async def close(self) -> None:
        """See Dialogue."""
        self._is_over = True
        await self._session.close()

    def abandon(self) -> None:
        """See Dialogue."""
        if not self._is_over:
            self._is_over = True
            self._session.abandon()


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Opens dialogues with sessions of the environment."""

    pool: SessionPool
    language: Renderer
    decode: Callable[[list[int]], str]
    """Returns the text of tokens, special tokens left out."""
    deterministic: bool
    """Whether a session that gets the same turns again gives the same answers."""

    async def open(self, rollout: Rollout, *, answered: int, seed: int, alone: bool) -> SessionDialogue:
        """See Open."""
        if answered and not self.deterministic:
            rollout.restart(rollout.prompt.input)
        session = await self.pool.open(rollout.prompt, seed=seed, alone=alone)
        dialogue, opening = SessionDialogue(session, self.language), session.opening
        try:
            prompt = self._rendered(opening)
            if not rollout.turns:
                rollout.restart(ModelInput(prompt))
                rollout.messages = list(opening.messages)
            elif not await self._same(rollout, prompt, dialogue, answered):
                dialogue.abandon()
                rollout.restart(rollout.prompt.input)
                return await self.open(rollout, answered=0, seed=seed, alone=alone)
        except BaseException:
            dialogue.abandon()
            raise
        return dialogue

    def _rendered(self, opening: Opening) -> Ids:
        try:
            return self.language.open(opening.messages, opening.tools)
        except (DataError, SettingError) as error:
            raise SessionFailed(Trouble.NOT_RENDERED, str(error)) from None

    async def _same(self, rollout: Rollout, prompt: Ids, dialogue: SessionDialogue, answered: int) -> bool:
        """Returns whether a new session says what the one before it said, to the same responses."""
        messages, end = list(dialogue.opening.messages), 0
        said = prompt
        for turn in range(answered + 1):
            start = rollout.turns[turn][0] if turn < len(rollout.turns) else rollout.num_tokens
            if not np.array_equal(said, rollout.token_ids[end:start]):
                return False
            if turn == answered:
                return True
            end = rollout.turns[turn][1]
            again = until(rollout, end, messages, self.decode)
            answer = await dialogue.respond(again)
            if answer.verdict:
                return False
            messages, said = again.messages, np.asarray(answer.token_ids, dtype=np.int32)
        return True


def until(rollout: Rollout, end: int, messages: list[Message], decode: Callable[[list[int]], str]) -> Rollout:
    """Returns a rollout as it was when a response had ended.

    Args:
        end: one after the last token of the response.
        messages: the conversation before it.
    """
    start = next(start for start, last in rollout.turns if last == end)
    return replace(
        rollout,
        input=ModelInput(rollout.token_ids[:end]),
        loss_mask=rollout.loss_mask[:end],
        rollout_logprobs=rollout.rollout_logprobs[:end],
        versions=rollout.versions[:end],
        finish_reason=FinishReason.STOP,
        token_rewards=None,
        routes=None,
        text=decode(rollout.token_ids[start:end].tolist()),
        messages=messages,
    )
