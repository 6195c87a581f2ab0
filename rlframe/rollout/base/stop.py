"""The token at which a stop string ends a response, by one rule for all engines."""

from collections.abc import Sequence
from typing import Any


def reach(stop: Sequence[str]) -> int:
    """Returns how many of the newest tokens can spell a stop string: a character takes at most 4 byte-level tokens."""
    return 4 * max(len(string) for string in stop) + 4


def completes(newest: list[int], stop: Sequence[str], tokenizer: Any) -> bool:
    """Returns whether the last token of a response completes a stop string. One that an earlier token has completed, as
    before min_tokens, does not count.

    Args:
        newest: the last tokens of the response, `reach` of them or all.
    """
    text = tokenizer.decode(newest)
    if not any(string in text for string in stop):
        return False
    # A part of a character is U+FFFD.
    before = tokenizer.decode(newest[:-1]).rstrip("\ufffd")
    known = len(before) if text.startswith(before) else 0
    return any(text.find(string, max(0, known - len(string) + 1)) >= 0 for string in stop)
