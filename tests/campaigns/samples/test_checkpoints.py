"""A sample of the campaign over damaged checkpoints."""

from pathlib import Path

from tests.campaigns.checkpoints import attempt, faults, written_run
from tests.campaigns.trials import Outcome


def test_damage_of_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    run = written_run(tmp_path / "written")
    sample = [fault for fault in faults(run) if not fault.as_nobody][::9]
    trials = [attempt(fault, run, tmp_path) for fault in sample]
    assert len(trials) > 30
    assert [trial for trial in trials if trial.outcome is Outcome.WRONG] == []
    assert all(trial.seconds is not None and trial.seconds < 60 for trial in trials)
