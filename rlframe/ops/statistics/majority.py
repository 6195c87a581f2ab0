"""Majority votes among answers. Pure."""

from collections import Counter
from collections.abc import Sequence


def elected(answers: Sequence[str | None]) -> int | None:
    """Returns the place of the first attempt that gave the most frequent answer. Of several equally frequent answers it
    is the one that was given first. None, no answer, has no vote; None is returned where nobody votes.

    Source: Wang et al., "Self-Consistency Improves Chain of Thought Reasoning" (arXiv 2203.11171), unweighted sum.

    Example:
        >>> elected(["7", "8", None, "8"])
        1
    """
    votes = Counter(answer for answer in answers if answer is not None)
    # Counter keeps the order of first votes, and max takes the first of equals.
    return answers.index(max(votes, key=votes.__getitem__)) if votes else None
