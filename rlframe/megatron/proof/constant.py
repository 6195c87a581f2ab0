"""Weights that nothing trains (a reference, a teacher, a reward model, the base of adapters) must stay as loaded."""

import secrets
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from rlframe.megatron.model.model import Model
from rlframe.utils.errors import WeightsDrifted
from rlframe.weight_sync.proof.digest import DigestPlan

SEED = secrets.randbits(64)
"""Seed of the digests. A rank compares only its own digests, so it can be constant."""


class ConstantWeights:
    """Digests of a rank's tensors that must not change."""

    def __init__(
        self,
        what: str,
        model: Model,
        *,
        names: Iterable[str] | None = None,
        active: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Records the digests of the present tensors.

        Args:
            what: name of the weights, for messages.
            model: the model, which holds the tensors inside `active()`.
            names: the tensors that must not change; None means all.
        """
        self._what, self._active, self._tensors = what, active, list(model.layout.tensors)
        self._plan = DigestPlan(model.layout, model.parameters, names=None if names is None else list(names), seed=SEED)
        self._noted = self._digests()

    def require_unchanged(self, rank: int) -> None:
        """Compares the tensors with their recorded digests.

        Raises:
            WeightsDrifted: a tensor has changed; the message names it.
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
