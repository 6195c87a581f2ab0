"""The calls that the engine makes in the process of `sglang.Engine`, and both make in SGLang's scheduler processes."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from rlframe.types.batch import TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import GenerationRequest
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank

T = TypeVar("T")

SCHEDULER_CALL = "rlframe_call"
"""Name of the method that rlframe's ranks add to SGLang's Scheduler. SGLang calls it by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished request."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """One of stop, length and abort."""
    routes: np.ndarray | None = None
    """See `Completion.routes`."""


class EngineHost(Protocol):
    """The process that runs `sglang.Engine`: `host.Host`."""

    async def generate(self, name: str, request: GenerationRequest) -> Answer:
        """Samples until the request ends."""
        ...

    async def score(self, name: str, sequence: ModelInput) -> list[float]:
        """Returns the nats of each token but the first, under log_softmax(logits)."""
        ...

    async def top(self, name: str, sequence: ModelInput, k: int) -> TopLogprobs:
        """Returns the k most likely tokens in the place of each token but the first."""
        ...

    async def begin_profile(self, folder: str, activities: list[str], stacks: bool) -> None:
        """Begins SGLang's own profiler in every scheduler.

        Args:
            folder: folder of its files.
            activities: by SGLang's names, such as CPU and GPU.
            stacks: whether traces hold Python functions.
        """
        ...

    async def end_profile(self) -> None:
        """Ends the profiler. Its files are written then."""
        ...

    async def ranks(self, name: str, calls: list[bytes]) -> list[tuple[Any, Any, bool]]:
        """Forwards calls to the schedulers.

        Args:
            name: name of the call, for messages.
            calls: by rank, the pickled RankCall of SchedulerRank.

        Returns:
            By rank: the result, the error or None, and whether a reload was interrupted.
        """
        ...


class SchedulerRank(Protocol):
    """A scheduler process: `worker.Rank`."""

    def weights(self, call: RankCall[DestinationRank, T]) -> T:
        """Calls this rank's WeightDestination and returns its answer."""
        ...

    def pause(self, keep: bool) -> None:
        """Stops the scheduler. Nothing is computed afterwards.

        Args:
            keep: running requests keep their keys and values; otherwise they go back to the queue with their tokens.
        """
        ...

    def counts(self) -> dict[str, int]:
        """Returns the number of tokens of each unfinished request, by name, while the scheduler is paused."""
        ...

    def flush(self) -> bool:
        """Empties the prefix cache. Returns False while a batch is still running, which prevents it."""
        ...

    def part(self) -> None:
        """Makes requests that have not begun, and those that have to begin again, share no keys and values with those
        that run."""
        ...

    def proceed(self) -> None:
        """Undoes `pause`. Waiting requests are recomputed, with the tokens they have, by the present weights."""
        ...

    def abort(self, names: list[str], now: bool) -> dict[str, tuple[list[int], list[float]]]:
        """Ends these requests. Returns tokens and logprobs of those that had begun and were waiting again. For them
        SGLang itself returns only what it has already sent, which it does every 50 tokens.

        Args:
            now: they end also if the scheduler is paused with requests that keep their keys and values; all of these
                then lose them. Otherwise they end when it goes on.
        """
        ...

    def release(self, tags: list[str]) -> int:
        """Frees the memory of `tags`. Returns the bytes that this rank's device gained."""
        ...

    def restore(self, tags: list[str]) -> None:
        """Gives `tags` memory again."""
        ...

    def checksums(self) -> dict[str, str]:
        """Returns SGLang's own checksum of each parameter of this rank, by name.

        Raises:
            WeightSyncFailed: this SGLang has no checksums.
        """
        ...
