"""ModelInput: what a model is given."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from rlframe.types.compare import ByValue


@dataclass(frozen=True, slots=True, eq=False)
class ModelInput(ByValue):
    """One sequence as a model is given it. Prompts, requests, rollouts and what engines score carry it.

    Example:
        >>> len(ModelInput((7, 8)).then((5,)))
        3
    """

    token_ids: Int[np.ndarray, " L"]
    """[L] int32 tokens, from any sequence of integers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))

    def __len__(self) -> int:
        """Returns the number of positions L."""
        return len(self.token_ids)

    def then(self, token_ids: ArrayLike) -> "ModelInput":
        """Returns this input followed by tokens."""
        return ModelInput(np.concatenate([self.token_ids, np.asarray(token_ids, dtype=np.int32)]))
