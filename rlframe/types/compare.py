"""Comparison of dataclasses that hold arrays."""

from dataclasses import fields

import numpy as np


class ByValue:
    """Compares its fields, arrays element by element."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]  # type: ignore[arg-type]
        return all(
            np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs for mine, theirs in pairs
        )
