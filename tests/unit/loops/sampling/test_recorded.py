"""Groups that are written down on their way to the loop, and read again in their place."""

from pathlib import Path

import numpy as np
import pytest

from rlframe.attempts.account.recording import Recording, missing_steps, step_folder
from rlframe.attempts.account.stored import ARRAYS, read_groups, write_groups
from rlframe.loops.phases import Phases
from rlframe.loops.sampling.recorded import RecordingSampler, ReplaySampler
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group
from rlframe.utils.errors import CheckpointError, DataError, RlframeError


class Counting:
    """Gives a group that is named after the step."""

    def collect(self, step: int) -> list[Group]:
        return [Group.begin(f"{step}", Prompt(id="p", text="", input=ModelInput(np.array([step]))), 2)]

    def metrics(self) -> dict[str, float]:
        return {"rollout/rounds": 2.0}


def replay(output: Path, *, run: str = "a", num_minibatches: int = 1) -> ReplaySampler:
    recording = Recording(run=run, settings={}, tokenizer="")
    return ReplaySampler(
        output=output,
        recording=recording,
        phase=Phases(sharing=[], announce=lambda name: None),
        num_minibatches=num_minibatches,
    )


def test_what_is_recorded_is_replayed(tmp_path: Path) -> None:
    phase = Phases(sharing=[], announce=lambda name: None)
    recording = RecordingSampler(sampler=Counting(), output=tmp_path, phase=phase)
    given = {step: recording.collect(step) for step in (1, 2)}
    assert recording.metrics() == {"rollout/rounds": 2.0} and set(phase.totals) == {"record"}
    # A step that is done again after a restart replaces its recording.
    given[2] = recording.collect(2)
    assert given == {step: Counting().collect(step) for step in (1, 2)}
    for step in (2, 1):
        assert replay(tmp_path).collect(step) == given[step] == read_groups(step_folder(tmp_path, step))


def test_a_run_that_is_resumed_forgets_the_recordings_of_the_steps_that_it_does_again(tmp_path: Path) -> None:
    phase = Phases(sharing=[], announce=lambda name: None)
    killed = RecordingSampler(sampler=Counting(), output=tmp_path, phase=phase)
    for step in (1, 2, 3, 4):
        killed.collect(step)
    resumed = RecordingSampler(sampler=Counting(), output=tmp_path, phase=phase)
    # Killed once more: what the first program sampled for steps 3 and 4 does not follow this step 2.
    resumed.collect(2)
    assert missing_steps(tmp_path, 4) == [3, 4]
    resumed.collect(3)
    assert missing_steps(tmp_path, 4) == [4]


def test_a_batch_that_was_not_full_is_replayed_in_whole_minibatches(tmp_path: Path) -> None:
    groups = [
        Group.begin(f"{place}", Prompt(id="p", text="", input=ModelInput(np.array([1]))), 2) for place in range(6)
    ]
    write_groups(step_folder(tmp_path, 3), groups)
    for num_minibatches, kept in ((2, 6), (4, 4), (5, 5)):
        made = replay(tmp_path, num_minibatches=num_minibatches)
        assert made.collect(3) == groups[:kept]
        left_over = {"rollout/dropped_left_over_groups": float(6 - kept)} if kept < 6 else {}
        assert made.metrics() == left_over
    with pytest.raises(RlframeError, match=r"step 3: .* has 6 groups, fewer than the 8 that an update needs"):
        replay(tmp_path, num_minibatches=8).collect(3)


def test_a_step_that_was_damaged_later_is_named(tmp_path: Path) -> None:
    phase = Phases(sharing=[], announce=lambda name: None)
    RecordingSampler(sampler=Counting(), output=tmp_path, phase=phase).collect(7)
    (step_folder(tmp_path, 7) / ARRAYS).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000007/groups.npz is damaged"):
        replay(tmp_path).collect(7)


def test_a_resumed_replay_goes_on_with_its_own_recording_only(tmp_path: Path) -> None:
    replay(tmp_path).restore(replay(tmp_path).state())
    with pytest.raises(
        DataError, match="holds the recording of run b, not that of the checkpoint: a; put that one back"
    ):
        replay(tmp_path, run="b").restore(replay(tmp_path).state())
    with pytest.raises(DataError, match="not that of the checkpoint: None"):
        replay(tmp_path).restore({"epoch": 0})
