"""Code of one's own that a run calls."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframe.loops.stop import Stop

if TYPE_CHECKING:
    from rlframe.types.batch import Sequences
    from rlframe.types.rollout import Rollout

ASKED = "stopped by a callback"


class Callback:
    """Code of one's own in a run: derive from it and define the methods that are needed. The driver calls them between
    the parts of the run, which waits for them.

    An error that a method raises ends the run, as any other error does. After a death of processes, steps since the
    last checkpoint come again.
    """

    _asked = ""

    def stop(self, reason: str = ASKED) -> None:
        """Makes the present step the last one. The run saves a checkpoint and ends. The same configuration goes on from
        there. In the last step it changes nothing."""
        self._asked = reason or ASKED

    def on_start(self, config: Any) -> None:
        """Receives the RunConfig, once, when all processes are there and before the first step."""

    def on_batch(self, step: int, rollouts: "Sequence[Rollout]", batch: "Sequences") -> None:
        """Receives the batch of a step before the policy trains on it, and the rollouts in it. Offline there are
        none. Neither must be changed."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives a copy of what metrics.jsonl has of a step, after it. What is added there is written nowhere."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives a copy of the metrics of an evaluation of the weights of `step`. 0 is before training."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Receives the folder of a checkpoint. Where checkpoint.asynchronous holds it appears when it is complete."""

    def on_end(self, results: Mapping[str, float]) -> None:
        """Receives what `rlframe.run` returns, after the last step. Not after an error."""


class Callbacks:
    """The callbacks of a run, called in their order."""

    def __init__(self, callbacks: Sequence[Callback] = (), stop: Stop | None = None):
        """
        Args:
            stop: ends the run when a callback asks for it.
        """
        self._all, self._stop, self._started = callbacks, stop, False
        for callback in callbacks:
            # What it has asked of an earlier run is no wish for this one.
            callback._asked = ""
        self.results: Mapping[str, float] = {}
        """Results of the loop so far."""
        self.asked = False
        """Whether a callback has asked for the end."""

    def on_start(self, config: Any, results: Mapping[str, float]) -> None:
        """Calls each on_start, unless the run goes on after a death of its processes.

        Args:
            results: of the loop, which go on changing.
        """
        self.results = results
        if not self._started:
            self._call("on_start", config)
        self._started = True

    def on_batch(self, step: int, rollouts: "Sequence[Rollout]", batch: "Sequences") -> None:
        """Calls each on_batch."""
        self._call("on_batch", step, rollouts, batch)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls each on_step."""
        self._call("on_step", step, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls each on_evaluation."""
        self._call("on_evaluation", step, metrics)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Calls each on_checkpoint."""
        self._call("on_checkpoint", step, folder)

    def on_end(self) -> None:
        """Calls each on_end."""
        self._call("on_end", self.results)

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self._all:
            # Of its own, so that no callback gets what another one has changed.
            getattr(callback, name)(*(dict(each) if isinstance(each, Mapping) else each for each in arguments))
            if callback._asked and not self.asked and self._stop:
                self.asked = True
                self._stop.ask(callback._asked, code=0)
