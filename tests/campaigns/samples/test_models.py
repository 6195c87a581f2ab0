"""A sample of the campaign of model folders."""

from pathlib import Path

from tests.campaigns.models import Campaign
from tests.campaigns.trials import Outcome


def test_no_damaged_model_folder_of_a_sample_is_accepted_or_ends_in_a_traceback(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    trials = [*campaign.of_counts("qwen3_moe"), *campaign.of_templates(), *campaign.of_paths()]
    trials += [*campaign.of_tensors("llama"), *list(campaign.of_numbers("llama"))[::7]]
    assert [trial for trial in trials if trial.outcome is Outcome.WRONG] == []
    (sound,) = [campaign.tried("sound", campaign.copy("qwen3_moe"))]
    assert sound.outcome is Outcome.USED, sound.said
