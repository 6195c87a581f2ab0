"""Groups that are written down on their way to the loop, and read again in their place."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.attempts.recording import Recording, step_folder
from rlframe.attempts.stored import ARRAYS, read_groups
from rlframe.loops.phases import Phases
from rlframe.loops.recording import RecordingSampler, ReplaySampler
from rlframe.loops.sampling import Sampler
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group
from rlframe.utils.errors import CheckpointError, DataError


@dataclass(kw_only=True)
class Counting(Sampler):
    """Gives a group that is named after the step."""

    settled: list[int] = field(default_factory=list)

    def collect(self, step: int) -> list[Group]:
        return [Group.begin(f"{step}", Prompt(id="p", text="", input=ModelInput(np.array([step]))), 2)]

    def settle(self, step: int) -> None:
        self.settled.append(step)

    def metrics(self) -> dict[str, float]:
        return {"rollout/rounds": 2.0}


def counting() -> Counting:
    nobody: Any = None
    phase = Phases(sharing=[], announce=lambda name: None)
    return Counting(leases=nobody, attempts=nobody, scorer=None, phase=phase, prompts_per_step=1, group_size=2)


def replay(output: Path, *, run: str = "a") -> ReplaySampler:
    recording = Recording(run=run, settings={}, tokenizer="")
    return ReplaySampler(output=output, recording=recording, phase=Phases(sharing=[], announce=lambda name: None))


def test_what_is_recorded_is_replayed(tmp_path: Path) -> None:
    sampler = counting()
    recording = RecordingSampler.of(sampler, tmp_path)
    given = {step: recording.collect(step) for step in (1, 2)}
    assert recording.metrics() == {"rollout/rounds": 2.0} and set(sampler.phase.totals) == {"record"}
    # A step that is done again after a restart replaces its recording.
    given[2] = recording.collect(2)
    assert given == {step: sampler.collect(step) for step in (1, 2)}
    for step in (2, 1):
        recording.settle(step)
        assert replay(tmp_path).collect(step) == given[step] == read_groups(step_folder(tmp_path, step))
    assert sampler.settled == [2, 1]


def test_a_step_that_was_damaged_later_is_named(tmp_path: Path) -> None:
    RecordingSampler.of(counting(), tmp_path).collect(7)
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
