"""A sample of the campaign of data sets."""

from pathlib import Path

from tests.campaigns.datasets import Campaign
from tests.campaigns.trials import Outcome


def test_no_hostile_data_set_of_a_sample_is_used_wrongly_or_ends_in_a_traceback(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    trials = [*campaign.of_fields(stride=101), *campaign.of_files(("conversations",))]
    assert [trial for trial in trials if trial.outcome is Outcome.WRONG] == []
    assert {trial.outcome for trial in trials} == {Outcome.REFUSED, Outcome.USED}
