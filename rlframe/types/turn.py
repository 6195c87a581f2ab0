"""Turns: how each response of an attempt ended, what became of its calls of tools, and the state it was given in."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlframe.types.messages import Message

STATE_DIGITS = 16
"""Hexadecimal digits of the fingerprint of a state: 64 bits."""


class CallEnd(StrEnum):
    """Ends of a call of a tool."""

    DONE = "done"
    """It returned a result."""
    FAILED = "failed"
    """The tool failed, does not exist, or refused the arguments. The policy reads why."""
    TIMED_OUT = "timed_out"
    """It took too long."""
    NOT_DONE = "not_done"
    """It was one call too many of its turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """One response of the policy, as its attempt saw it."""

    finish_reason: str
    """The FinishReason of the response itself."""
    malformed: tuple[str, ...] = ()
    """Sentences about calls of tools that could not be read."""
    calls: tuple[str, ...] = ()
    """The CallEnd of each call that could be read, in order. Empty if the environment does not say."""
    reward: float = 0.0
    """Reward that the environment gave for the turn."""
    trouble: str = ""
    """The way in which the environment failed at this turn, a Trouble. Empty if it answered."""
    state: str = ""
    """Fingerprint of the state that the response was given in. Turns of the same state have the same."""
    leads_to: str = ""
    """Fingerprint of the state after the environment's answer."""


def shown_last(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the messages since the policy's last one."""
    said = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return messages[said[-1] + 1 :] if said else messages


def state_of_messages(messages: Iterable[Message]) -> str:
    """Returns the fingerprint of a state that is known by what the policy was shown last. Ids of calls, which the
    policy's own words may decide, are not part of it."""
    shown = [[str(each.get("role", "")), str(each.get("name", "")), each.get("content")] for each in messages]
    return _fingerprint(["shown", shown])


def state_of_name(name: str) -> str:
    """Returns the fingerprint of a state that the environment has named."""
    return _fingerprint(["named", name])


def state_of_tokens(token_ids: bytes) -> str:
    """Returns the fingerprint of a state that is known by everything that came before."""
    return hashlib.sha256(token_ids).hexdigest()[:STATE_DIGITS]


def _fingerprint(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:STATE_DIGITS]
