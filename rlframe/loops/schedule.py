"""The schedule: which steps a loop does, and what follows which of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rlframe.loops.saving.checkpoints import Checkpoints
from rlframe.loops.stop import Stop


class Event(StrEnum):
    """Names what may follow a step, in the order in which it does."""

    PROBE = "probe"
    EVALUATION = "evaluation"
    EXPORT = "export"
    CHECKPOINT = "checkpoint"
    """The last: what goes on from the checkpoint of a step has nothing of that step left to do."""


AT_THE_END = (Event.EVALUATION, Event.CHECKPOINT)
"""What follows the last step, whatever its number."""


@dataclass(kw_only=True)
class Schedule:
    """Does the steps of a loop, and after each of them what is due."""

    last_step: int
    every: Mapping[Event, int]
    """Steps from one occurrence to the next; 0 or absent is never."""
    checkpoints: Checkpoints
    prove: Callable[[int], None] = lambda _: None
    """Called after each step; has the ranks prove their weights when it is time."""
    stop: Stop = field(default_factory=Stop)
    """Ends the run before its last step where that is asked for."""

    def run(self, done_steps: int, step: Callable[[int], None], after: Mapping[Event, Callable[[int], None]]) -> None:
        """Does all steps after the first `done_steps`.

        Args:
            step: does the step of a number.
            after: what to do when an event is due, with the number of the step.

        Raises:
            Stopped: the run was asked to end, and what it had to save is saved.
        """
        for number in self.stop.steps(done_steps + 1, self.last_step, settle=self.checkpoints.finish):
            step(number)
            self.prove(number)
            self.checkpoints.check()
            for event in Event:
                if event in after and self.is_due(event, number):
                    after[event](number)
        self.checkpoints.finish()

    def is_due(self, event: Event, step: int) -> bool:
        """Returns whether `event` follows `step`. A checkpoint also follows a step that is made the last one."""
        asked = event is Event.CHECKPOINT and self.stop.wants_save(step)
        every = self.every.get(event, 0)
        return asked or (event in AT_THE_END and step == self.last_step) or (every > 0 and step % every == 0)
