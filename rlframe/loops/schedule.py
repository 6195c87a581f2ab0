"""The schedule of a loop: its steps, and the events after each of them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum

from rlframe.loops.saving.checkpoints import Checkpoints
from rlframe.loops.stop import Stop
from rlframe.ops.threads import one_thread


class Event(StrEnum):
    """Events that may follow a step, in this order."""

    PROBE = "probe"
    EVALUATION = "evaluation"
    EXPORT = "export"
    CHECKPOINT = "checkpoint"
    """The last event, so that a run that resumes from the checkpoint of a step has nothing of that step left to do."""


AT_THE_END = (Event.EVALUATION, Event.CHECKPOINT)
"""Events that follow the last step, whatever its number."""


@dataclass(kw_only=True)
class Schedule:
    """Runs the steps of a loop, and the events that are due after each of them."""

    last_step: int
    every: Mapping[Event, int]
    """Number of steps between two occurrences of each event. 0 or absent means never."""
    checkpoints: Checkpoints
    prove: Callable[[int], None] = lambda _: None
    """Called after each step; makes the ranks prove their weights when it is due."""
    profiled: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
    """Block around each step; records it if it is to be profiled."""
    begin: Callable[[], None] = lambda: None
    """Called before the first step."""
    stop: Stop = field(default_factory=Stop)
    """Ends the run before its last step on request."""

    def run(self, done_steps: int, step: Callable[[int], None], after: Mapping[Event, Callable[[int], None]]) -> None:
        """Runs all steps after the first `done_steps`.

        Args:
            step: does the step of a number.
            after: what to do when an event is due, with the number of the step.

        Raises:
            Stopped: the run was requested to end, and has saved if it had to.
        """
        self.begin()
        steps = self.stop.steps(done_steps + 1, self.last_step, settle=self.checkpoints.finish)
        try:
            with closing(steps):
                for number in steps:
                    # The ranks have the cores: what the driver computes in a step is small.
                    with self.profiled(number), one_thread():
                        step(number)
                    self.prove(number)
                    self.checkpoints.check()
                    for event in Event:
                        if event in after and self.is_due(event, number):
                            after[event](number)
        except BaseException:
            # What failed does not concern the checkpoint before it.
            if not self.stop.at_once:
                self.checkpoints.abandon()
            raise

    def is_due(self, event: Event, step: int) -> bool:
        """Returns whether `event` follows `step`. A checkpoint also follows a step that is made the last one."""
        every = self.every.get(event, 0)
        due = (event in AT_THE_END and step == self.last_step) or (every > 0 and step % every == 0)
        return self.stop.begins_save(step, due=due) if event is Event.CHECKPOINT else due
