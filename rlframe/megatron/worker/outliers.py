"""Optimizer steps that are skipped, because their gradient norm is an outlier."""

from collections import deque
from statistics import median

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from rlframe.megatron.config.optimizer import OptimizerConfig

WINDOW = 100
"""Number of the last gradient norms whose median is compared with."""
FEWEST = 10
"""Number of norms below which their median says too little."""
KEY = "optimizer.skipping"
"""Name of the state in a checkpoint."""


class Outliers:
    """Decides which steps are skipped, and counts them. The same on every rank, because all have the same norms."""

    def __init__(self, config: OptimizerConfig):
        self._above, self._factor = config.skip_norm_above, config.skip_outlier_factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        """Number of steps that were skipped so far in the run."""

    def skips(self, norm: float) -> bool:
        """Returns whether a step with this finite gradient norm is skipped, and remembers the norm."""
        bound = self._above if self._above is not None else float("inf")
        if self._factor is not None and len(self._norms) >= FEWEST:
            bound = min(bound, self._factor * median(self._norms))
        self._norms.append(norm)
        self.skipped += norm > bound
        return norm > bound

    def state(self) -> dict[str, ShardedTensor]:
        """Returns the entry of a checkpoint: the count, and the norms with the last one first, followed by NaN."""
        values = torch.full((1 + WINDOW,), torch.nan, dtype=torch.float64)
        values[: 1 + len(self._norms)] = torch.tensor([self.skipped, *reversed(self._norms)], dtype=torch.float64)
        return {KEY: ShardedTensor.from_rank_offsets(KEY, values, replica_id=dist.get_rank())}

    def load(self, state: dict[str, Tensor]) -> None:
        """Goes on from the entry of a checkpoint, with the values that were read."""
        count, *norms = state[KEY].tolist()
        self.skipped = int(count)
        self._norms = deque((norm for norm in reversed(norms) if norm == norm), maxlen=WINDOW)
