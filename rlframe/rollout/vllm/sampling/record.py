"""The record of sampled tokens and their logprobs inside vLLM's worker, by request and position.

vLLM's own way to return logprobs costs objects and messages for each token and request, a third of the time of a
rollout. The sampler writes them here instead, and the engine fetches those of a request once, when it has ended.
"""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NOT_RECORDED = (0, -1)
"""Row and number of a request that has none."""
FIRST_WIDTH = 256
"""Number of tokens of a response for which a record has memory at first."""
MOST_TAKEN = 1 << 16
"""Number of requests, those that were taken last, that do not begin again."""


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one step of the model, which may still be on their way from the device."""

    rows: Int[np.ndarray, " B"]
    owners: Int[np.ndarray, " B"]
    """[B] numbers of the requests, which have the rows unless they were taken."""
    indices: Int[np.ndarray, " B"]
    sampled: Bool[np.ndarray, " B"]
    """[B] whether a row has sampled a token that counts."""
    tokens: Tensor
    logprobs: Tensor
    arrived: torch.cuda.Event | None
    """None if the tensors never were on a device."""


class TokenRecord:
    """Tokens and logprobs of requests. A request keeps its row until it is taken, also while vLLM has preempted it.
    Other threads than that of the steps may take."""

    def __init__(self, num_rows: int):
        """
        Args:
            num_rows: number of requests for which there is memory at first.
        """
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._free = list(range(num_rows))
        self._owners = np.zeros(num_rows, dtype=np.int64)
        """Number of the request that has each row. A step that was sampled for an earlier one is left out by it."""
        self._counts = np.zeros(num_rows, dtype=np.int64)
        self._tokens = np.zeros((num_rows, FIRST_WIDTH), dtype=np.int32)
        self._logprobs = np.zeros((num_rows, FIRST_WIDTH), dtype=np.float32)
        self._steps: deque[Step] = deque()
        self._num_begun = 0
        self._taken: OrderedDict[str, None] = OrderedDict()

    def begin(self, key: str) -> tuple[int, int]:
        """Returns the row and the number of a request, new ones if it has none. NOT_RECORDED if it was taken: vLLM may
        have begun a step with it before it learned that the request had ended, and nobody would take it again."""
        with self._lock:
            if key in self._taken:
                return NOT_RECORDED
            if key not in self._rows:
                if not self._free:
                    self._grow(rows=len(self._owners))
                row = self._rows[key] = self._free.pop()
                self._num_begun += 1
                self._owners[row], self._counts[row] = self._num_begun, 0
            row = self._rows[key]
            return row, int(self._owners[row])

    def add(
        self,
        rows: Int[np.ndarray, " B"],
        owners: Int[np.ndarray, " B"],
        indices: Int[np.ndarray, " B"],
        sampled: Bool[np.ndarray, " B"],
        *,
        tokens: Int[Tensor, " B"],
        logprobs: Float[Tensor, " B"],
    ) -> None:
        """Records the tokens of one step. The device does not wait for it.

        Args:
            rows, owners: what `begin` has returned, or NOT_RECORDED. Requests that were taken since are left out.
            indices: places of the tokens in their responses.
            sampled: False where a prompt is not at its end yet, whose token vLLM drops.
            tokens, logprobs: on the device.
        """
        arrived = None
        if tokens.is_cuda:
            # vLLM's own copies wait for this stream, so that these have arrived when a token has.
            tokens, logprobs = (each.to("cpu", non_blocking=True) for each in (tokens, logprobs))
            arrived = torch.cuda.Event()
            arrived.record()
        with self._lock:
            self._steps.append(Step(rows, owners, indices, sampled, tokens, logprobs, arrived))
            self._read_arrived()

    def take(self, key: str, count: int) -> tuple[Int[np.ndarray, " L"], Float[np.ndarray, " L"]]:
        """Returns the first `count` tokens of a request and their logprobs, fewer if it has not as many, and frees its
        row."""
        with self._lock:
            self._taken[key] = None
            if len(self._taken) > MOST_TAKEN:
                self._taken.popitem(last=False)
            row = self._rows.pop(key, None)
            if row is None:
                return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
            self._read_arrived()
            while self._counts[row] < count and self._steps:
                self._read(self._steps.popleft())
            end = min(count, int(self._counts[row]))
            found = self._tokens[row, :end].copy(), self._logprobs[row, :end].copy()
            self._owners[row] = 0
            self._free.append(row)
            return found

    def __len__(self) -> int:
        """Returns the number of requests."""
        return len(self._rows)

    def _read_arrived(self) -> None:
        while self._steps and ((arrived := self._steps[0].arrived) is None or arrived.query()):
            self._read(self._steps.popleft())

    def _read(self, step: Step) -> None:
        if step.arrived is not None:
            step.arrived.synchronize()
        (places,) = np.nonzero(step.sampled & (self._owners[step.rows] == step.owners))
        if not len(places):
            return
        rows, indices = step.rows[places], step.indices[places]
        # A token may be sampled again after a preemption. One that is missing before it is never there: the record
        # then ends in front of the gap.
        known = indices <= self._counts[rows]
        places, rows, indices = places[known], rows[known], indices[known]
        if indices.max(initial=0) >= self._tokens.shape[1]:
            self._grow(width=int(indices.max()) + 1)
        self._tokens[rows, indices] = step.tokens.numpy()[places]
        self._logprobs[rows, indices] = step.logprobs.numpy()[places]
        self._counts[rows] = indices + 1

    def _grow(self, *, rows: int = 0, width: int = 0) -> None:
        """Adds `rows` rows, and doubles the width until it is at least `width`."""
        num_rows, old_width = self._tokens.shape
        added = (0, 0) if width <= old_width else (0, max(width, 2 * old_width) - old_width)
        self._tokens = np.pad(self._tokens, ((0, rows), added))
        self._logprobs = np.pad(self._logprobs, ((0, rows), added))
        self._owners = np.pad(self._owners, (0, rows))
        self._counts = np.pad(self._counts, (0, rows))
        self._free += range(num_rows, num_rows + rows)
