"""A sample of the planted sync faults: each is reported with the tensor's name, and the next sync is whole again."""

import pytest

from tests.campaigns.syncs import trials
from tests.campaigns.trials import Outcome


@pytest.mark.parametrize(("layout", "transport"), [("d2e2", "shm"), ("d2p2 tied", "reload"), ("t2", "nccl")])
def test_planted_sync_faults_are_reported_by_name(layout: str, transport: str) -> None:
    found = list(trials([layout], [transport], repeats=1))
    assert len(found) >= 12
    assert [trial for trial in found if trial.outcome is not Outcome.REPORTED] == []
