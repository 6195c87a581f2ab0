"""The replay loop: trains on the groups that another run has recorded. Without engines nothing is sampled, judged,
synced or evaluated."""

from dataclasses import dataclass

from rlframe.loops.online import RolloutLoop
from rlframe.loops.sampling.recorded import ReplaySampler
from rlframe.loops.schedule import Event


@dataclass(kw_only=True)
class ReplayLoop(RolloutLoop):
    """Repeats the training of a recorded run: the same losses, gradients and weights, bit for bit, where nothing else
    differs."""

    sampler: ReplaySampler

    @property
    def source(self) -> ReplaySampler:
        """The recording."""
        return self.sampler

    def run(self, done_steps: int) -> None:
        """Runs all steps after the first `done_steps`, and the events that are due between them."""
        self.metrics.print_line(f"replays {self.sampler.output}, without engines: nothing is evaluated")
        self.schedule.run(done_steps, self.step, {Event.EXPORT: self.export_step, Event.CHECKPOINT: self.save})
