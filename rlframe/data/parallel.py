"""Work on many conversations in several processes: rendering and tokenisation, which Python does one by one.

Processes are forks, so nothing is sent to them but places, and only what they made is sent back. Results come in the
order of the places, whatever the number of processes, and so does the first error.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from rlframe.utils.errors import DataError

T = TypeVar("T")
Work = Callable[[range], T]
"""Function of the places to work on. What it changes besides its result is lost in a process of its own."""
CHUNK = 512
"""Number of conversations that a process is given at a time."""
PER_PROCESS = 2000
"""Least number of conversations for which a further process is started unasked: it costs a tenth of a second."""
AHEAD = 2
"""Number of chunks for each process that are at work or wait to be taken."""

_work: Work


def num_processes(asked: int | None, count: int) -> int:
    """Returns the number of processes for `count` conversations.

    Args:
        asked: `data.num_processes`. None is a process for each 2000, at most one for each core; but only this one where
            other threads run, whose locks a fork would inherit.
    """
    if asked is None:
        alone = threading.active_count() == 1
        asked = min(len(os.sched_getaffinity(0)), count // PER_PROCESS) if alone else 1
    return max(1, min(asked, -(-count // CHUNK)))


def in_chunks(work: Work[T], count: int, *, processes: int) -> Iterator[T]:
    """Yields what `work` returns for each chunk of `count` places, in their order.

    Raises:
        Exception: what `work` raised for the first of the chunks for which it did.
        DataError: a process was killed, for example because memory ran out.
    """
    chunks = deque(range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))
    if processes == 1:
        yield from map(work, chunks)
        return
    fork = multiprocessing.get_context("fork")
    running: deque[Future[T]] = deque()
    with ProcessPoolExecutor(processes, mp_context=fork, initializer=_begin, initargs=(work,)) as pool:
        try:
            while chunks or running:
                while chunks and len(running) < AHEAD * processes:
                    running.append(pool.submit(_do, chunks.popleft()))
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that renders and tokenises records was killed, as when memory runs out; set "
                f"data.num_processes to less than {processes}"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(work: Work) -> None:
    """Keeps the work, which a fork has without being sent it."""
    global _work
    _work = work
    # Ctrl-C is the parent's to handle. The library of tokenizers keeps threads of its own, which a fork has not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _do(places: range) -> Any:
    return _work(places)
