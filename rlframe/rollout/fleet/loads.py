"""Loads: which engine gets what."""

from collections.abc import Sequence


class Loads:
    """The tokens that each engine may still have to compute.

    Example:
        >>> Loads(2).deal([10, 30, 20])
        [1, 0, 1]
    """

    def __init__(self, num_engines: int):
        self._loads = [0] * num_engines

    def deal(self, sizes: Sequence[int]) -> list[int]:
        """Returns the engine of each piece of work. The largest is dealt first, each to the engine with the fewest
        tokens, so that the assignment depends on the sizes and on unfinished work only.

        Args:
            sizes: greatest number of tokens that each piece may take.
        """
        engines = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda each: sizes[each], reverse=True):
            engines[index] = self._loads.index(min(self._loads))
            self._loads[engines[index]] += sizes[index]
        return engines

    def finish(self, engine: int, size: int) -> None:
        """Takes finished work off its engine."""
        self._loads[engine] -= size
