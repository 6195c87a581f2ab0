"""A reward that costs next to nothing, the same for both sides of step_vs_trl.py."""


def score(response: str, answer: str | None = None) -> float:
    """Part of the response's characters whose code is even, in [0, 1]."""
    return sum(ord(character) % 2 == 0 for character in response) / max(1, len(response))
