"""TensorBoard event files."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlframe.loops.reporting.trackers.base import COLUMNS, table
from rlframe.utils.files.whole import writing


class TensorBoard:
    """Writes TensorBoard event files."""

    def __init__(self, folder: pathlib.Path, done_steps: int | None):
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - costs seconds, and may be switched off

        self._folder = folder
        self._open = partial(SummaryWriter, str(folder))
        self._writer = self._open(purge_step=_next(done_steps))

    def rewind(self, done_steps: int | None) -> None:
        """Makes TensorBoard drop later steps, which run again."""
        self._writer.close()
        self._writer = self._open(purge_step=_next(done_steps))

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step, as one event: its thread then takes the driver's time once, and not for each metric."""
        from tensorboard.compat.proto import summary_pb2  # noqa: PLC0415 - as above

        # Made by protobuf when it is imported, so that no checker of types sees it.
        kind: Any = vars(summary_pb2)["Summary"]
        events = self._writer.file_writer
        assert events is not None, "a SummaryWriter has one until it is closed"
        with writing(self._folder):
            values = [kind.Value(tag=key, simple_value=value) for key, value in metrics.items()]
            events.add_summary(kind(value=values), step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a text for each sample, in Markdown."""
        with writing(self._folder):
            for number, cells in enumerate(table(rows)):
                text = json.dumps(dict(zip(COLUMNS, cells, strict=True)), ensure_ascii=False, indent=1)
                quoted = "\n".join(f"    {line}" for line in text.splitlines())
                self._writer.add_text(f"samples/{number}", quoted, step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - files know no state
        """Flushes the files."""
        with writing(self._folder):
            self._writer.close()


def _next(done_steps: int | None) -> int:
    """Returns the first step that is written after `done_steps`. That of a run that begins anew replaces what a killed
    one has left."""
    return 0 if done_steps is None else done_steps + 1
