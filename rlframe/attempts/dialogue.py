"""The other side of an attempt as the runner sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlframe.environments.config import Verdict
from rlframe.types.messages import Message
from rlframe.types.rollout import Rollout
from rlframe.types.turn import TurnRecord, state_of_messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to a response of the policy."""

    token_ids: Sequence[int] = ()
    """The tokens that follow the response. Empty if the attempt is over."""
    begins_anew: bool = False
    """Whether `token_ids` are the whole conversation, rendered anew, with which a further sequence begins."""
    cut_off: bool = False
    """Whether the response has reached its limit, so that the environment was not asked."""
    verdict: Verdict | None = None
    """The verdict on the attempt, if it is over."""
    messages: Sequence[Message] = ()
    """The messages since the last answer: the response, and the environment's."""
    reward: float = 0.0
    """Reward of the turn."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment."""
    malformed: tuple[str, ...] = ()
    """Sentences about calls of tools that could not be read."""
    calls: tuple[str, ...] = ()
    """The CallEnd of each call, if the environment says."""
    leads_to: str = ""
    """Fingerprint of the state after the answer."""

    def note(self, rollout: Rollout, *, trouble: str = "") -> None:
        """Adds everything but the tokens to an attempt.

        Args:
            trouble: the way in which the environment failed, if this is all that it answered.
        """
        record_turn(
            rollout,
            malformed=self.malformed,
            calls=self.calls,
            reward=self.reward,
            leads_to=self.leads_to,
            trouble=trouble,
        )
        rollout.messages = [*rollout.messages, *self.messages]
        rollout.numbers = {**rollout.numbers, **self.numbers}
        if self.reward:
            rollout.credit(self.reward)


def record_turn(rollout: Rollout, **seen: Any) -> None:
    """Records the last response of an attempt, whose messages are those before it.

    Args:
        seen: further fields of the TurnRecord.
    """
    state = rollout.records[-1].leads_to if rollout.records else ""
    if not rollout.records and rollout.messages:
        state = state_of_messages(rollout.messages)
    record = TurnRecord(finish_reason=str(rollout.finish_reason), state=state, **seen)
    rollout.records = (*rollout.records, record)


OVER = Answer(verdict=Verdict.TRAIN)


class Dialogue(Protocol):
    """The conversation of one attempt with its environment."""

    async def respond(self, rollout: Rollout) -> Answer:
        """Returns the answer to the last response of `rollout`, which stays as it is.

        Raises:
            SessionFailed: the environment failed.
        """
        ...

    async def close(self) -> None:
        """Ends the session after the last answer.

        Raises:
            SessionFailed: the environment failed.
        """
        ...

    def abandon(self) -> None:
        """Ends the session at any time, without waiting for it. A second call does nothing."""
        ...


class Open(Protocol):
    """Begins dialogues."""

    async def __call__(
        self, rollout: Rollout, *, earlier: Sequence[Rollout], answered: int, seed: int, alone: bool
    ) -> Dialogue:
        """Begins the dialogue of an attempt. One without responses gets its prompt. One with responses goes on where it
        was if the environment says the same again, and otherwise begins anew.

        Args:
            earlier: earlier sequences of the attempt.
            answered: number of responses that the environment has answered.
            seed: the environment's.
            alone: see SessionPool.open.

        Raises:
            SessionFailed: the environment failed.
        """
        ...


class Silence:
    """The dialogue of attempts that are over after one response."""

    async def respond(self, rollout: Rollout) -> Answer:
        """See Dialogue."""
        return OVER

    async def close(self) -> None:
        """See Dialogue."""

    def abandon(self) -> None:
        """See Dialogue."""


SILENCE = Silence()


async def single_turn(
    rollout: Rollout, *, earlier: Sequence[Rollout], answered: int, seed: int, alone: bool
) -> Dialogue:
    """See Open."""
    return SILENCE
