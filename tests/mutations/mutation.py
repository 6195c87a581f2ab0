"""What a planted fault is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """Holds one fault to plant, and the test that must notice it."""

    name: str
    """Says what is wrong then, in a few words; unique."""
    file: str
    """Below the repository's root."""
    old: str
    """Text that stands exactly once in the file."""
    new: str
    """What takes its place."""
    test: str
    """A pytest node, or several with a space between, that pass on the right code and fail on this one."""
    survives: str = ""
    """Why no test can notice it; empty for a fault that must be killed."""


def faults(file: str, test: str, *rows: tuple[str, str, str]) -> list[Mutation]:
    """Returns faults of one file that one test kills.

    Args:
        rows: (name, old, new) of each.
    """
    return [Mutation(name=name, file=file, old=old, new=new, test=test) for name, old, new in rows]
