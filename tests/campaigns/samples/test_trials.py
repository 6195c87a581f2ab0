"""The table of a campaign counts by outcome, and times only what has a time."""

import json
from pathlib import Path

from tests.campaigns.trials import Outcome, Trial, summarise, write

TRIALS = [
    Trial(name="a", outcome=Outcome.REFUSED, said="no", seconds=1.0),
    Trial(name="b", outcome=Outcome.REFUSED, said="no", seconds=3.0),
    Trial(name="c", outcome=Outcome.WRONG, said="Traceback", seconds=8.0),
    Trial(name="d", outcome=Outcome.USED),
]


def test_a_row_counts_outcomes_and_times() -> None:
    # Of 1, 3 and 8 seconds the median is 3; the trial without a time counts as tried only.
    assert summarise("door", TRIALS).row() == "| door | 4 | 2 refused, 1 used, 1 wrong | 3.00 | 8.00 |"


def test_whatever_went_wrong_is_written_down(tmp_path: Path) -> None:
    write("door", TRIALS, command="python -m tests.campaigns.door", folder=tmp_path)
    content = json.loads((tmp_path / "faults_door.json").read_text())
    assert [trial["name"] for trial in content["wrong"]] == ["c"]
    assert {trial["name"] for trial in content["sample"]} == {"a", "b", "d"}
