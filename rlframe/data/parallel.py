"""Work on many conversations in several processes: rendering and tokenisation, which Python does one by one.

Each process is a bare interpreter (`python -m rlframe.data.parallel DESCRIPTOR`) that imports only its work: it has no
lock of a thread of this process, and does not run the user's main module as a pool of the standard library would. It is
sent the work once and then a chunk at a time. Results come in the order of the chunks, whatever the number of
processes, and so does the first error.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from rlframe.utils.errors import DataError

X = TypeVar("X")
T = TypeVar("T")
Work = Callable[[Sequence[X]], T]
"""Function of some of the things to work on. It is pickled to other processes, where what it changes besides its result
is lost."""
CHUNK = 512
"""Number of conversations that a process is given at a time."""
PER_PROCESS = 20_000
"""Least number of conversations for which a further process is started unasked: importing transformers takes one as
long as so many short conversations."""
AHEAD = 2
"""Number of chunks for each process that are at work or wait to be taken."""


def num_processes(asked: int | None, count: int) -> int:
    """Returns the number of processes for `count` conversations.

    Args:
        asked: `data.num_processes`. None is a process for each 20,000, at most one for each core.
    """
    if asked is None:
        asked = min(len(os.sched_getaffinity(0)), count // PER_PROCESS)
    return max(1, min(asked, -(-count // CHUNK)))


def in_chunks(work: Work[X, T], things: Sequence[X], *, processes: int) -> Iterator[T]:
    """Yields what `work` returns for each chunk of `things`, in their order. One process is this one.

    Raises:
        Exception: what `work` raised for the first of the chunks for which it did.
        DataError: a process was killed, for example because memory ran out.
    """
    chunks = deque(range(start, min(start + CHUNK, len(things))) for start in range(0, len(things), CHUNK))
    if processes == 1:
        yield from (work(things[chunk.start : chunk.stop]) for chunk in chunks)
        return
    sent = pickle.dumps(work)
    workers = [_Worker(sent) for _ in range(processes)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def ask(some: Sequence[X]) -> T:
        worker = idle.get_nowait()
        try:
            return worker.ask(some)
        except (EOFError, ConnectionError) as error:
            raise DataError(
                f"a process that renders and tokenises records was killed, as when memory runs out; set "
                f"data.num_processes to less than {processes}"
            ) from error
        finally:
            idle.put(worker)

    running: deque[Future[T]] = deque()
    # A thread for each process, which does nothing but wait for it.
    with ThreadPoolExecutor(processes) as pool:
        try:
            while chunks or running:
                while chunks and len(running) < AHEAD * processes:
                    chunk = chunks.popleft()
                    running.append(pool.submit(ask, things[chunk.start : chunk.stop]))
                yield running.popleft().result()
        finally:
            for worker in workers:
                worker.close()
            pool.shutdown(cancel_futures=True)


class _Worker:
    """A process that does the work, as seen by the one that needs it done."""

    def __init__(self, work: bytes):
        """Starts it without waiting for it.

        Args:
            work: the work, pickled.
        """
        self._to_send = [work]
        self._connection, theirs = Pipe()
        # A session of its own: Ctrl-C does not reach it. The library of tokenizers would start a thread for each core.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlframe.data.parallel", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def ask(self, things: Sequence[Any]) -> Any:
        """Returns what the work makes of `things`.

        Raises:
            Exception: what the work raised.
            EOFError, ConnectionError: the process is gone.
        """
        while self._to_send:
            self._connection.send_bytes(self._to_send.pop())
        self._connection.send(things)
        made, error = self._connection.recv()
        if error is not None:
            raise error
        return made

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def main() -> None:
    """Receives the work, and does it for chunk after chunk until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    try:
        work = pickle.loads(connection.recv_bytes())
        while True:
            connection.send(_attempt(work, connection.recv()))
    except (EOFError, ConnectionError):
        return


def _attempt(work: Work[Any, Any], things: Sequence[Any]) -> tuple[Any, Exception | None]:
    """Returns what the work makes of `things`, or the error that it raises."""
    try:
        return work(things), None
    except Exception as error:  # It is raised where the work is waited for.
        return None, error


if __name__ == "__main__":
    main()
