"""A sample of the campaign: a rank that is stopped is named in seconds, and the run goes on when it does."""

from pathlib import Path

import pytest

from tests.campaigns.processes import Fault, Run, faults, plant
from tests.campaigns.trials import Outcome


@pytest.mark.thorough
def test_a_stopped_rank_is_named_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, 0, num_steps=100000)
    try:
        run.ready()
        trial = plant(run, Fault(how="stop", victim="policy 1", phase="train"))
    finally:
        run.program.kill()
    assert trial.outcome is Outcome.REPORTED, trial
    assert "policy rank 1" in trial.said and "which is stopped" in trial.said
    assert trial.seconds is not None and trial.seconds < 20


def test_the_class_has_sixty_members() -> None:
    assert len({str(fault) for fault in faults({"stop", "slow", "kill", "hold", "last"})}) >= 60
