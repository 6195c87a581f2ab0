"""What counts as a difference between two runs."""

from dataclasses import replace

from tests.campaigns.unchanged import Numbers, digest, first_difference

RECORD = {"step": 1, "train/loss": 0.5, "train/entropy_nats": 1.0}
BEFORE = Numbers(keys=["step", "train/loss"], lines=["a", "b"], weights="w")


def test_a_line_is_its_recorded_metrics_to_the_last_bit() -> None:
    same = digest(RECORD, BEFORE.keys)
    assert digest(RECORD | {"a/new": 2.0, "train/entropy_nats": 9.0}, BEFORE.keys) == same
    assert digest(RECORD | {"train/loss": 0.5000000000000001}, BEFORE.keys) != same
    assert digest({"step": 1}, BEFORE.keys) != same, "one that is no longer there"


def test_the_first_difference_is_named() -> None:
    assert first_difference(BEFORE, BEFORE) == ""
    assert first_difference(BEFORE, replace(BEFORE, lines=["a", "c"])) == "line 2 of metrics.jsonl"
    assert first_difference(BEFORE, replace(BEFORE, lines=["a"])) == "1 lines of metrics, recorded were 2"
    assert first_difference(BEFORE, replace(BEFORE, weights="v")) == "the exported weights"
