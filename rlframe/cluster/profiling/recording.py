"""The record that is under way in one process, and the phase that its calls belong to."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rlframe.cluster.profiling.request import Recorder, Request
from rlframe.cluster.profiling.trace import Summary, summarise


class Recording:
    """Records one process during one step. Its ranges are the phases, and inside them the calls of the driver."""

    def __init__(self, recorder: Recorder, request: Request):
        """Begins to record."""
        self._recorder, self._request = recorder, request
        self.phase = ""
        """Name of the phase under way. Empty between phases."""
        self._phases: set[str] = set()
        recorder.begin()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Gives a call of the driver its ranges."""
        phase = self.phase
        self._phases.add(phase)
        with self._recorder.range(phase) if phase else nullcontext(), self._recorder.range(name):
            yield

    def end(self) -> Summary:
        """Ends the record, writes its files and returns what they say; see `trace.summarise`."""
        return summarise(self._recorder.end(), phases=self._phases - {""})

    def drop(self) -> None:
        """Ends the record without files."""
        self._recorder.drop()
