"""What the engine asks of the process that runs `sglang.Engine`, and what both ask of SGLang's scheduler processes."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from rlframe.types.batch import TopLogprobs
from rlframe.types.rollout import GenerationRequest
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank

T = TypeVar("T")

SCHEDULER_CALL = "rlframe_call"
"""The method that our ranks add to SGLang's Scheduler, which SGLang calls by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished request."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop, length or abort."""
    routes: np.ndarray | None = None
    """See `Completion.routes`."""


class EngineHost(Protocol):
    """The process that runs `sglang.Engine`: `host.Host`."""

    async def generate(self, name: str, request: GenerationRequest) -> Answer:
        """Samples until the request ends."""
        ...

    async def score(self, name: str, token_ids: tuple[int, ...]) -> list[float]:
        """Returns the nats of each token but the first, under log_softmax(logits)."""
        ...

    async def top(self, name: str, token_ids: tuple[int, ...], k: int) -> TopLogprobs:
        """Returns the k likeliest tokens in the place of each but the first."""
        ...

    async def ranks(self, name: str, calls: list[bytes]) -> list[tuple[Any, Any, bool]]:
        """Passes calls on to the schedulers.

        Args:
            name: of the call, for messages.
            calls: by rank, the pickled RankCall of SchedulerRank.

        Returns:
            By rank: the result, the error instead, and whether a reload was cut short.
        """
        ...


class SchedulerRank(Protocol):
    """A scheduler process: `worker.Rank`."""

    def weights(self, call: RankCall[DestinationRank, T]) -> T:
        """Returns what this rank's WeightDestination answers."""
        ...

    def pause(self) -> None:
        """Sends running requests back to the queue with what they have; nothing is computed after this."""
        ...

    def flush(self) -> dict[str, int] | None:
        """Empties the prefix cache. Returns by request that waits the tokens it has; None where a batch is still under
        way."""
        ...

    def proceed(self) -> None:
        """Undoes `pause`: waiting requests are computed anew, with what they have, by the present weights."""
        ...

    def abort(self, names: list[str]) -> dict[str, tuple[list[int], list[float]]]:
        """Ends these requests. Returns tokens and logprobs of those that had begun and were waiting again: SGLang
        answers for them with what it has told so far, which is every 50 tokens."""
        ...

    def release(self, tags: list[str]) -> int:
        """Has `tags` give back their memory. Returns the bytes that this rank's device gained."""
        ...

    def restore(self, tags: list[str]) -> None:
        """Gives `tags` memory again."""
        ...

    def checksums(self) -> dict[str, str]:
        """Returns by parameter SGLang's own checksum of what this rank holds.

        Raises:
            WeightSyncFailed: SGLang does not work them out.
        """
        ...
