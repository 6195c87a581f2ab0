"""The logprobs and experts of responses, fetched from the records in vLLM's worker: those of many in one call."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float, Int, Shaped

from rlframe.utils.errors import RlframeError

Wanted = tuple[str, int, int]
"""Name of a record, the number of tokens, and the number of tokens, prompt included, whose experts are wanted."""
Take = Callable[[list[Wanted]], Awaitable[list[bytes]]]
"""Calls `Extension.rlframe_take` of every rank."""
Experts = Shaped[np.ndarray, "rows layers k"]
Taken = tuple[Int[np.ndarray, " L"], Float[np.ndarray, " L"], Experts | None]
"""Tokens of a response, their logprobs, and experts if the engine records them."""
MOST_ROWS = 1 << 17
"""Tokens whose experts one call brings, unless one response has more: 50 MB for 48 layers with 8 experts a token."""


class Fetcher:
    """Fetches from the record, in one call at a time. All of it runs in the engine's asyncio loop."""

    def __init__(self, take: Take):
        self._take = take
        self._one_call = asyncio.Lock()
        self._next: tuple[list[Wanted], asyncio.Task[list[Taken]]] | None = None
        """Arguments of the next call, and the call. None if no request waits for one."""
        self._open: set[str] = set()
        self._unwanted: list[str] = []
        """Records that were closed without being fetched. The next call ends them."""

    @contextmanager
    def record(self, key: str) -> Iterator[str]:
        """Yields the name of a record, which ends with this context at the latest."""
        self._open.add(key)
        try:
            yield key
        finally:
            if key in self._open:
                self._open.remove(key)
                self._unwanted.append(key)

    async def take(
        self, key: str, token_ids: list[int], *, num_rows: int = 0
    ) -> tuple[Float[np.ndarray, " L"], Experts | None]:
        """Returns [L] float32 nats of a response, and the experts of its sequence's first tokens, and ends its record.

        Args:
            key: name of the record.
            token_ids: [L] as vLLM has returned them.
            num_rows: number of tokens whose experts are wanted.

        Raises:
            RlframeError: the record is not of these tokens.
        """
        if self._next is None:
            # The call begins after the tasks that are ready now: responses that end in one step share it.
            wanted: list[Wanted] = []
            self._next = wanted, asyncio.get_running_loop().create_task(self._fetch(wanted))
        wanted, call = self._next
        self._open.remove(key)
        place = len(wanted)
        wanted.append((key, len(token_ids), num_rows))
        found, logprobs, experts = (await asyncio.shield(call))[place]
        if not np.array_equal(found, token_ids):
            raise RlframeError(
                f"the record of logprobs in vLLM's worker is not of the tokens that vLLM has returned: it has "
                f"{len(found)} of {len(token_ids)}, and the first {_equal(found, token_ids)} are equal"
            )
        return logprobs, experts

    async def _fetch(self, wanted: list[Wanted]) -> list[Taken]:
        async with self._one_call:
            self._next = None
            unwanted, self._unwanted = self._unwanted, []
            taken: list[Taken] = []
            for some in parts([*wanted, *((key, 0, 0) for key in unwanted)]):
                ranks = filter(None, map(pickle.loads, await self._take(some)))
                taken += [max(found, key=lambda each: len(each[0])) for found in zip(*ranks, strict=True)]
            return taken


def parts(wanted: list[Wanted]) -> Iterator[list[Wanted]]:
    """Yields what is wanted in parts of at most MOST_ROWS rows of experts each, or of one record."""
    part: list[Wanted] = []
    num_rows = 0
    for each in wanted:
        if part and num_rows + each[2] > MOST_ROWS:
            yield part
            part, num_rows = [], 0
        part.append(each)
        num_rows += each[2]
    yield part


def _equal(found: Int[np.ndarray, " L"], token_ids: list[int]) -> int:
    """Returns the number of equal tokens in front of the first difference."""
    pairs = zip(found.tolist(), token_ids, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(found), len(token_ids)))
