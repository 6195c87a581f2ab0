"""Preflight's word on the recipes: each fits the hardware that its first lines name, and not a smaller one."""

import json
import re
from pathlib import Path

import pytest

from rlframe.config.load import composed
from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.plan import plan
from tests.e2e.recipes import MODELS
from tests.meta.checkout import ROOT

HARDWARE = re.compile(r"# Hardware: (\d+) GPUs? of (80|141) GB")
RECIPES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if HARDWARE.search(path.read_text())]
DEVICES = {"80": "h100", "141": "h200"}
USUAL = {"grpo_qwen3_30b_a3b", "ppo_qwen3_8b"}
"""The recipes that `make test` looks at: experts, and a critic."""


@pytest.mark.parametrize(
    "file",
    [pytest.param(path, marks=[] if path.stem in USUAL else pytest.mark.thorough, id=path.stem) for path in RECIPES],
)
def test_a_recipe_fits_the_devices_that_it_names(file: Path, tmp_path: Path) -> None:
    found = HARDWARE.search(file.read_text())
    assert found is not None
    values, overrides = composed(file.stem), []
    for role in ("model", "teacher"):
        if role in values:
            (tmp_path / role).mkdir()
            (tmp_path / role / "config.json").write_text(json.dumps(MODELS[values[role]["path"]]))
            overrides.append(f"{role}.path={tmp_path / role}")
    run = load(file.stem, overrides)
    planned = plan(run, algorithm_of(run), KINDS[DEVICES[found[2]]])
    assert planned.num_devices == int(found[1])
    assert planned.fits, f"{planned.worst.peak} takes {planned.worst.peak_bytes / 1e9:.1f} GB"


def test_what_needs_large_devices_does_not_fit_smaller_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-30B-A3B"]))
    run = load("grpo_qwen3_30b_a3b", [f"model.path={tmp_path}"])
    assert not plan(run, algorithm_of(run), KINDS["h100"]).fits
