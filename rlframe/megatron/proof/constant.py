"""Weights that nothing trains (a reference, a teacher, a reward model, the base of adapters) stay what was loaded."""

import secrets
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from rlframe.megatron.model.model import Model
from rlframe.utils.errors import WeightsDrifted
from rlframe.weight_sync.proof.digest import DigestPlan

SEED = secrets.randbits(64)
"""A rank compares its digests with its own only."""


class ConstantWeights:
    """Remembers the digest of each of a rank's tensors that must not change."""

    def __init__(
        self,
        what: str,
        model: Model,
        *,
        names: Iterable[str] | None = None,
        active: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Notes what the tensors are now.

        Args:
            what: whose weights, for messages.
            model: holds them while `active()` is.
            names: the tensors that must not change, all when None.
        """
        self._what, self._active, self._tensors = what, active, list(model.layout.tensors)
        self._plan = DigestPlan(model.layout, model.parameters, names=None if names is None else list(names), seed=SEED)
        self._noted = self._digests()

    def require_unchanged(self, rank: int) -> None:
        """Compares the tensors with what they were.

        Raises:
            WeightsDrifted: one has changed; names it.
        """
        changed = np.flatnonzero(self._digests() != self._noted).tolist()
        if changed:
            raise WeightsDrifted(
                f"{self._what} has changed in the memory of rank {rank} since it was loaded, though nothing trains it: "
                f"{self._tensors[changed[0]]}, {len(changed)} tensors in all"
            )

    @torch.no_grad()
    def _digests(self) -> np.ndarray:
        with self._active():
            return self._plan.shares()
