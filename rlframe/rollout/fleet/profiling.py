"""The profiler of an engine that has processes of its own."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlframe.cluster.profiling.request import Request
from rlframe.rollout.base.engine import ProfilesItself


class EngineRecorder:
    """Lets an engine record its processes. See `Recorder`."""

    def __init__(self, engine: ProfilesItself, request: Request):
        self._engine, self._request = engine, request

    def begin(self) -> None:
        """See Recorder."""
        self._engine.begin_profile(self._request)

    def end(self) -> list[Path]:
        """See Recorder."""
        return self._engine.end_profile(self._request)

    def drop(self) -> None:
        """See Recorder. The files are written and removed."""
        for file in self.end():
            file.unlink()

    def range(self, name: str) -> AbstractContextManager[Any]:  # noqa: ARG002 - engines name their own iterations
        """See Recorder."""
        return nullcontext()
