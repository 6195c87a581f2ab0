"""Predictions stay as near to what was measured as the documentation says."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import preflight


def test_predictions_are_near_what_was_measured() -> None:
    rows = preflight.compare()
    assert len(rows) == 16 and sum(not row["calibrated"] for row in rows) == 7
    for row in rows:
        assert abs(row["memory_bytes"]["error"]) < 0.02, row
        assert abs(row["train_s"]["error"]) < 0.25, row


def test_the_stored_comparison_is_that_of_the_present_arithmetic() -> None:
    stored = json.loads((preflight.RESULTS / "preflight.json").read_text())["rows"]
    for row, old in zip(preflight.compare(), stored, strict=True):
        assert row["case"] == old["case"]
        for key in ("memory_bytes", "train_s", "logprobs_s"):
            assert row[key]["predicted"] == pytest.approx(old[key]["predicted"])


def test_cases_to_be_measured_are_valid_and_fit_the_device() -> None:
    from models_by_size import MODELS

    for device, cases in (("h200", preflight.UNSEEN), ("h100", preflight.FROZEN)):
        for name, case in cases.items():
            lengths = list(case.get("lengths", [16384]))
            train = preflight.build(preflight.TrainConfig, {"max_tokens_per_microbatch": sum(lengths)} | case["train"])
            config = MODELS[case["model"]] | ({"num_hidden_layers": case["num_layers"]} if "num_layers" in case else {})
            accelerator = preflight.KINDS[device]
            found = preflight.predict(config, train, lengths, case.get("microbatches", 2), accelerator)
            assert found.memory_bytes < accelerator.memory_bytes, name
