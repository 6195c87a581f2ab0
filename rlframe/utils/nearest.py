"""The name that a person may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean grpo?`, or an empty text if no known name is similar. Of several, one with the same letters
    in another order comes first."""
    names = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), names)
    near.sort(key=lambda each: sorted(each) != sorted(name.casefold()))
    return f"did you mean {names[near[0]]}?" if near else ""
