"""Sources of a step's groups other than engines alone: recorded on the way, or read from a recording."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.attempts.account.recording import Recording, forget_after, step_folder
from rlframe.attempts.account.stored import read_groups, write_groups
from rlframe.loops.phases import Phases
from rlframe.loops.sampling.source import GroupSource
from rlframe.types.rollout import Group
from rlframe.utils.errors import DataError, RlframeError


@dataclass(kw_only=True)
class RecordingSampler:
    """Writes down the groups of each step before the loop trains on them, so that a step that fails can be replayed."""

    sampler: GroupSource
    output: Path
    """The run's folder."""
    phase: Phases

    def collect(self, step: int) -> list[Group]:
        """Returns the groups of the sampler, which are on the disk then. Later steps that are there are removed: a run
        that resumed before them samples others.

        Raises:
            OutputError: they cannot be written, or later ones not removed.
        """
        groups = self.sampler.collect(step)
        with self.phase("record"):
            forget_after(self.output, step)
            write_groups(step_folder(self.output, step), groups)
        return groups

    def settle(self, step: int) -> None:
        """See GroupSource."""
        self.sampler.settle(step)

    def reset(self) -> None:
        """See GroupSource."""
        self.sampler.reset()

    @property
    def untrained(self) -> Sequence[tuple[int, int]]:
        """See GroupSource."""
        return self.sampler.untrained

    @property
    def in_flight(self) -> bool:
        """See GroupSource."""
        return self.sampler.in_flight

    def hold(self, step: int) -> Callable[[Path], None]:
        """See GroupSource."""
        return self.sampler.hold(step)

    def go_on(self, folder: Path) -> None:
        """See GroupSource."""
        self.sampler.go_on(folder)

    def metrics(self) -> dict[str, float]:
        """Returns the sampler's metrics."""
        return self.sampler.metrics()


@dataclass(kw_only=True)
class ReplaySampler:
    """Gives the groups of a recording. Is the source of the loop's data too, whose position is the step alone."""

    output: Path
    """Folder of the run that recorded."""
    recording: Recording
    phase: Phases
    num_minibatches: int = 1
    """Number of groups of which a batch that was not full keeps a multiple."""

    def __post_init__(self) -> None:
        self._left_over = 0
        """Number of groups of the last step that are not trained on."""

    def collect(self, step: int) -> list[Group]:
        """Returns the groups that were recorded in a step, in whole minibatches.

        Raises:
            CheckpointError: they are damaged, or have been removed.
            RlframeError: too few groups for an optimizer step.
        """
        with self.phase("replay"):
            groups = read_groups(step_folder(self.output, step))
        # The run that recorded may have had other minibatches.
        self._left_over = len(groups) % self.num_minibatches
        whole = groups[: len(groups) - self._left_over]
        if not whole:
            raise RlframeError(
                f"step {step}: the recording in {self.output} has {len(groups)} groups, fewer than the "
                f"{self.num_minibatches} that an update needs; lower train.num_minibatches, or the critic's"
            )
        return whole

    def settle(self, step: int) -> None:
        """Does nothing: the run that recorded has the account."""

    def reset(self) -> None:
        """Does nothing: nothing is under way."""

    @property
    def untrained(self) -> Sequence[tuple[int, int]]:
        """Returns nothing: nothing is sampled."""
        return ()

    @property
    def in_flight(self) -> bool:
        """Returns False."""
        return False

    def hold(self, step: int) -> Callable[[Path], None]:
        """Returns what does nothing: nothing is under way."""
        return lambda _: None

    def go_on(self, folder: Path) -> None:
        """Does nothing: nothing is under way."""

    def metrics(self) -> dict[str, float]:
        """Returns the number of groups that are left over, if there are any."""
        return {"rollout/dropped_left_over_groups": float(self._left_over)} if self._left_over else {}

    def state(self) -> dict[str, Any]:
        """Returns which run recorded."""
        return {"recorded_by": self.recording.run}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Checks that the recording is the one that the run began with.

        Raises:
            DataError: it is another one.
        """
        if state != self.state():
            raise DataError(
                f"{self.output} holds the recording of run {self.recording.run}, not that of the checkpoint: "
                f"{state.get('recorded_by')}; put that one back, or start a new run"
            )
