"""The dialogue of an attempt with a session: messages there, tokens here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlframe.attempts.dialogue import Answer
from rlframe.attempts.rendering.renderer import Fork, Ids, Renderer
from rlframe.attempts.sessions.calls import Opening, SessionFailed, Trouble
from rlframe.attempts.sessions.pool import Session, SessionPool
from rlframe.environments.base import Turn
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.rollout import FinishReason, Rollout
from rlframe.types.turn import state_of_messages, state_of_name
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
        malformed = tuple(each.why for each in reply.malformed)
        if rollout.finish_reason is FinishReason.LENGTH:
            return Answer(cut_off=True, messages=[reply.message], malformed=malformed)
        turn = Turn(message=reply.message, text=rollout.text, finish_reason=rollout.finish_reason, malformed=malformed)
        try:
            step = await self._session.step(turn)
        except SessionFailed as failure:
            failure.answer = Answer(messages=[reply.message], malformed=malformed)
            raise
        answer = Answer(
            messages=[reply.message, *step.messages],
            reward=step.reward,
            numbers=step.metrics,
            malformed=malformed,
            calls=tuple(step.calls),
            leads_to=state_of_messages(step.messages) if step.state is None else state_of_name(step.state),
        )
        if step.is_over:
            return replace(answer, verdict=step.verdict)
        try:
            following: Any = self._language.follow(before, sampled, step.messages, self._tools, reply=reply)
        except (DataError, SettingError) as error:
            failure = SessionFailed(Trouble.NOT_RENDERED, str(error))
            failure.answer = answer
            raise failure from None
        if isinstance(following, Fork):
            return replace(answer, token_ids=following.token_ids.tolist(), begins_anew=True)
        return replace(answer, token_ids=following.tolist())

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

    async def open(
        self, rollout: Rollout, *, earlier: Sequence[Rollout], answered: int, seed: int, alone: bool
    ) -> SessionDialogue:
        """See Open."""
        if answered and not self.deterministic:
            rollout.restart(rollout.prompt.input)
            earlier = ()
        session = await self.pool.open(rollout.prompt, seed=seed, alone=alone)
        dialogue, opening = SessionDialogue(session, self.language), session.opening
        try:
            prompt = self._rendered(opening)
            if not rollout.turns and not earlier:
                rollout.restart(ModelInput(prompt))
                rollout.messages = list(opening.messages)
            elif not await self._same([*earlier, rollout], prompt.tolist(), dialogue, answered):
                dialogue.abandon()
                rollout.restart(rollout.prompt.input)
                return await self.open(rollout, earlier=(), answered=0, seed=seed, alone=alone)
        except SessionFailed as failure:
            dialogue.abandon()
            # That of an earlier turn, which the attempt has.
            failure.answer = Answer()
            raise
        except BaseException:
            dialogue.abandon()
            raise
        return dialogue

    def _rendered(self, opening: Opening) -> Ids:
        try:
            return self.language.open(opening.messages, opening.tools)
        except (DataError, SettingError) as error:
            raise SessionFailed(Trouble.NOT_RENDERED, str(error)) from None

    async def _same(
        self, sequences: Sequence[Rollout], said: Sequence[int], dialogue: SessionDialogue, answered: int
    ) -> bool:
        """Returns whether a new session says what the one before it said, to the same responses.

        Args:
            sequences: all sequences of the attempt.
            said: tokens with which the new session begins.
            answered: number of responses that the environment has answered.
        """
        messages, answer = list(dialogue.opening.messages), Answer(token_ids=said, begins_anew=True)
        for rollout in sequences:
            if not answer.begins_anew:
                return False
            end = 0
            for start, stop in [*rollout.turns, (rollout.num_tokens, rollout.num_tokens)]:
                if rollout.token_ids[end:start].tolist() != list(answer.token_ids):
                    return False
                if answered == 0:
                    return True
                again = until(rollout, start, stop, messages, self.decode)
                answer, answered, end = await dialogue.respond(again), answered - 1, stop
                if answer.verdict:
                    return False
                messages = [*messages, *answer.messages]
                if answer.begins_anew:
                    break
        return False


def until(
    rollout: Rollout, start: int, end: int, messages: list[Message], decode: Callable[[list[int]], str]
) -> Rollout:
    """Returns a rollout as it was when the response of the tokens [start, end) had ended.

    Args:
        messages: the conversation before it.
    """
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
