"""The base of all actors of worker groups: a log file, marks of actions, and stack dumps."""

import faulthandler
import functools
import inspect
import io
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rlframe.cluster import memory
from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.network import use_address
from rlframe.cluster.watch.flight import write_flight
from rlframe.cluster.watch.marks import Page, begin_marks, count_call, mark
from rlframe.cluster.watch.sight import STACK_SIGNAL, flight_file, mark_file, stack_file
from rlframe.cluster.watch.warned import note_warnings
from rlframe.utils.calls import RankCall
from rlframe.utils.outside import receive
from rlframe.utils.process import garbage
from rlframe.utils.process.memory import MemoryUse, used

if TYPE_CHECKING:
    from rlframe.cluster.profiling.recording import Recording
    from rlframe.cluster.profiling.request import Recorder, Request
    from rlframe.cluster.profiling.trace import Summary

LOOK_S = 0.25
"""Seconds between two checks whether the rank's flight record is requested."""


class Worker:
    """Base of the actor classes: one process, one rank. Every public method marks its beginning and its end."""

    _recording: "Recording | None" = None
    """The profile that is under way."""

    def __init__(
        self,
        *,
        role: str,
        rank: int,
        log_folder: str,
        num_threads: int,
        outside: Mapping[str, tuple[str, str]] | None = None,
        folder: str | None = None,
    ):
        """Imports the files of components from outside the package, if there are any. Garbage is collected from the
        first method on that does not start anything.

        Args:
            folder: the driver's working folder, in which relative paths then mean the same if this node has it; None
                stays where Ray has started the process.
        """
        garbage.hold()
        if folder is not None and pathlib.Path(folder).is_dir():
            os.chdir(folder)
        self.role, self.rank = role, rank
        self.log = pathlib.Path(log_folder) / f"{role}-{rank}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = self.log.open("a", buffering=1)
        self._log_begin = log.tell()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):
            # What a reward or an environment prints is there when its process is killed.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        faulthandler.enable(log)
        # On this signal Python prints every thread's stack there, even if the main thread hangs in C.
        faulthandler.register(STACK_SIGNAL, file=stack_file(self.log).open("w"), all_threads=True)
        page = begin_marks(mark_file(self.log))
        threading.Thread(target=answer_requests, args=(page, flight_file(self.log)), name="watch", daemon=True).start()
        note_warnings(self.log)
        # For what this process starts.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        self._begin()
        self.set_threads(num_threads)
        self.set_network()
        mark("start: the process runs")
        receive(outside or {})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, marked(member))

    def _begin(self) -> None:
        """Starts what takes seconds, before this process imports torch. For subclasses."""

    @staticmethod
    def set_threads(num_threads: int) -> None:
        """Shares the cores with the other ranks of this machine."""
        import torch  # noqa: PLC0415 - the driver imports this file for its names only

        torch.set_num_threads(num_threads)

    @staticmethod
    def set_network() -> None:
        """Connects to other workers at the address that Ray knows of this node."""
        import ray  # noqa: PLC0415 - a worker made without Ray (tests) does not need it

        if ray.is_initialized():
            use_address(ray.util.get_node_ip_address())

    def memory(self) -> MemoryUse:
        """Returns the memory that this process and its children use."""
        return used(with_children=True)

    def info(self) -> WorkerInfo:
        """Returns the location of this worker. It is the group's first call, which also waits for the constructor."""
        import ray  # noqa: PLC0415 - a worker made without Ray (tests) does not need it

        return WorkerInfo(
            role=self.role,
            rank=self.rank,
            node_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            log=str(self.log.absolute()),
        )

    def begin_profile(self, request: "Request") -> None:
        """Begins to record this process."""
        from rlframe.cluster.profiling.recording import Recording  # noqa: PLC0415 - profiles are rare

        self.drop_profile()
        self._recording = Recording(self._recorder(request), request)

    def _recorder(self, request: "Request") -> "Recorder":
        """Returns what records this process."""
        from rlframe.cluster.profiling.recorders import recorder  # noqa: PLC0415 - as above

        return recorder(request)

    def enter_phase(self, name: str) -> None:
        """Records that the calls from now on belong to a phase. Empty means none."""
        if self._recording:
            self._recording.phase = name

    def drop_profile(self) -> None:
        """Ends the record without files, if there is one: of a step that has failed, or that nobody asks for again."""
        recording, self._recording = self._recording, None
        if recording:
            recording.drop()

    def end_profile(self) -> "Summary | None":
        """Ends the record and writes its files. Returns what they say, or None if nothing was recorded."""
        recording, self._recording = self._recording, None
        return recording.end() if recording else None


def marked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `method` with a mark at its beginning and at its end, counted among the calls under way. A generator ends
    with its last item."""

    @functools.wraps(method)
    def call(self: Worker, *arguments: Any, **named: Any) -> Any:
        with noted(self, method.__name__ + forwarded(arguments)):
            return method(self, *arguments, **named)

    @functools.wraps(method)
    def each(self: Worker, *arguments: Any, **named: Any) -> Iterator[Any]:
        with noted(self, method.__name__ + forwarded(arguments)):
            yield from method(self, *arguments, **named)

    return each if inspect.isgeneratorfunction(method) else call


@contextmanager
def noted(worker: Worker, name: str) -> Iterator[None]:
    """Notes a call of a worker: with marks, in its profile if one is recorded, and in errors about memory."""
    count_call(1)
    mark(f"{name}: begun")
    try:
        # Once: another thread may end the profile.
        recording = worker._recording
        with recording.call(f"{worker.role}.{name}") if recording else nullcontext():
            yield
    except (RuntimeError, ValueError, MemoryError) as error:
        found = memory.named(
            error, role=worker.role, rank=worker.rank, call=name, log=worker.log, begin=worker._log_begin
        )
        if found is error:
            raise
        raise found from error
    finally:
        count_call(-1)
        mark(f"{name}: done")


def forwarded(arguments: tuple[Any, ...]) -> str:
    """Returns the name of the forwarded call, such as `(digests)`, if its first argument is a RankCall or a list of
    them."""
    first = arguments[0] if arguments else None
    first = first[0] if isinstance(first, list) and first else first
    return f"({first})" if isinstance(first, RankCall) else ""


def answer_requests(page: Page, flight: pathlib.Path) -> None:
    """Writes this process's flight record whenever `page` requests it. The main thread may hang in a collective
    meanwhile, because it releases Python's lock there."""
    answered = 0
    while True:
        time.sleep(LOOK_S)
        asked, _ = page.requests()
        if asked != answered:
            write_flight(flight)
            answered = asked
            page.answer(asked)
