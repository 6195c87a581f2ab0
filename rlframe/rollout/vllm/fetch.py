"""The logprobs of responses, fetched from the record in vLLM's worker: those of many responses in one call."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float, Int

from rlframe.utils.errors import RlframeError

Take = Callable[[list[tuple[str, int]]], Awaitable[list[bytes]]]
"""Calls `Extension.rlframe_take` of every rank."""
Taken = tuple[Int[np.ndarray, " L"], Float[np.ndarray, " L"]]
"""Tokens of a response, and their logprobs."""


class Fetcher:
    """Fetches from the record, in one call at a time. All of it runs in the engine's asyncio loop."""

    def __init__(self, take: Take):
        self._take = take
        self._one_call = asyncio.Lock()
        self._next: tuple[list[tuple[str, int]], asyncio.Task[list[Taken]]] | None = None
        """What the next call asks for, and the call. None if no request waits for one."""
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

    async def logprobs(self, key: str, token_ids: list[int]) -> Float[np.ndarray, " L"]:
        """Returns [L] float32 nats of a response, and ends its record.

        Args:
            key: name of the record.
            token_ids: [L] as vLLM has returned them.

        Raises:
            RlframeError: the record is not of these tokens.
        """
        if self._next is None:
            # The call begins after the tasks that are ready now: responses that end in one step share it.
            wanted: list[tuple[str, int]] = []
            self._next = wanted, asyncio.get_running_loop().create_task(self._fetch(wanted))
        wanted, call = self._next
        self._open.remove(key)
        place = len(wanted)
        wanted.append((key, len(token_ids)))
        found, logprobs = (await asyncio.shield(call))[place]
        if not np.array_equal(found, token_ids):
            raise RlframeError(
                f"the record of logprobs in vLLM's worker is not of the tokens that vLLM has returned: it has "
                f"{len(found)} of {len(token_ids)}, and the first {_equal(found, token_ids)} are equal"
            )
        return logprobs

    async def _fetch(self, wanted: list[tuple[str, int]]) -> list[Taken]:
        async with self._one_call:
            self._next = None
            unwanted, self._unwanted = self._unwanted, []
            answers = await self._take([*wanted, *((key, 0) for key in unwanted)])
        ranks = filter(None, map(pickle.loads, answers))
        return [max(found, key=lambda each: len(each[0])) for found in zip(*ranks, strict=True)]


def _equal(found: Int[np.ndarray, " L"], token_ids: list[int]) -> int:
    """Returns the number of equal tokens in front of the first difference."""
    pairs = zip(found.tolist(), token_ids, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(found), len(token_ids)))
