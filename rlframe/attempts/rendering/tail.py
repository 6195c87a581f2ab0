"""The text that a chat template writes after a turn of the assistant."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlframe.data.text.special_tokens import Rendering
from rlframe.types.messages import Message
from rlframe.utils.errors import DataError

WORD = re.compile("[A-Za-z0-9]+")
"""Pattern of text that templates do not escape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """The end of an assistant's turn, and what follows it."""

    full: Rendering
    """The whole conversation."""
    rest: Rendering
    """The conversation from the token at which the turn ends."""
    space: str
    """White space that the template writes before `rest`."""
    end: str
    """The token with which `rest` begins."""
    ends: tuple[str, ...]
    """Tokens that end the turn for the template: `end`, and the one that it writes if nothing follows."""


def tail_after(sentinel: str, *, full: Rendering, closed: Rendering, ends: Sequence[str]) -> Tail:
    """Returns what follows a turn that ends with the sentinel.

    A turn may be closed by text that belongs to it, such as that of a call. It is what the template also writes if the
    turn is the last one (`closed`), up to a special token. A template that writes none there, as GLM's, ends the turn
    with the first token of the next one.

    Args:
        full: the conversation with the turn and the messages after it.
        closed: the conversation up to the turn.
        ends: tokens that can end a turn, the longest first.

    Raises:
        DataError: the template does not write the sentinel once, or no special token ends the turn.
    """
    after, closing = (_after(sentinel, rendering) for rendering in (full, closed))
    closure = closing.rstrip()
    own = next((token for token in ends if closure.endswith(token)), "")
    closure = closure.removesuffix(own)
    spaced = after.removeprefix(closure)
    rest = spaced.lstrip()
    end = next((token for token in ends if rest.startswith(token)), "")
    if not after.startswith(closure) or not end:
        raise DataError(
            f"{full.where}: expected a special token to end a turn of the assistant, found {after[:40]!r} after it; "
            "the tokens of such a chat template cannot be told apart"
        )
    found = tuple(dict.fromkeys(token for token in (end, own) if token))
    space = spaced[: len(spaced) - len(rest)]
    return Tail(full=full, rest=replace(full, marked=rest), space=space, end=end, ends=found)


def check_all_are_written(messages: Sequence[Message], rest: Rendering, *, where: str) -> None:
    """Raises an error if the template silently drops a message."""
    for message in messages:
        words = WORD.findall(str(message.get("content") or ""))
        # Any of them is enough: some templates write numbers anew.
        if words and not any(word in rest.text for word in words):
            raise DataError(
                f"{where}: the chat template leaves out the content of role {message['role']}; templates may write a "
                "tool's answer only after a turn that has calls"
            )


def _after(sentinel: str, rendering: Rendering) -> str:
    parts = rendering.marked.split(sentinel)
    if len(parts) != 2:
        raise DataError(
            f"{rendering.where}: the chat template writes a turn of the assistant {len(parts) - 1} times, expected once"
        )
    return parts[1]
