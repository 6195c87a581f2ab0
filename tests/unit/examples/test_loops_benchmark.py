"""The benchmark of every loop: its cases are accepted for a GPU and fit it, and calls share their result."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import loops
from recipes import Watched

from rlframe.run.check import planned_faults
from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.plan import plan
from rlframe.tools.plan import on


@pytest.mark.thorough
@pytest.mark.parametrize("name", loops.CASES)
def test_a_case_is_accepted_for_gpus_of_80_gb_and_fits_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without its weights, which take a GPU to draw.
    monkeypatch.setattr(loops, "make_teacher", lambda config, folder, device: loops.make_model(config, folder))
    device, case = KINDS["h100"], loops.CASES[name]
    arguments = Namespace(rehearse=False, model="qwen3_1p7b", teacher="qwen3_1p7b", set=[])
    config = on(device, load(case.config, loops.overrides(case, tmp_path, arguments)))
    faults = [fault for fault in planned_faults(config) if str(fault.key) != "teacher.path"]
    assert [str(fault) for fault in faults] == []
    lengths = {"prompt_tokens": loops.PROMPT_TOKENS, "response_tokens": loops.RESPONSE_TOKENS}
    found = plan(config, algorithm_of(config), device, **lengths)
    assert found.fits and len(found.devices) == case.devices


def test_figures_are_of_the_counted_steps_and_phases() -> None:
    def phases(seconds: float) -> list[dict[str, float | str]]:
        return [{"name": "train", "start_s": 10.0, "end_s": 10.0 + seconds}]

    steps = [{"time/train_s": float(step), "train/loss": 1.0 / step} for step in range(1, 6)]
    timeline = [{"step": step, "phases": phases(step)} for step in range(1, 6)]
    timeline[0]["phases"].append({"name": "checkpoint", "start_s": 0.0, "end_s": 1.0})
    found = loops.figures(Watched(steps=steps, timeline=timeline, rc=0, start_s=7.0))
    assert found["phases_s"] == {"train": 4.0}
    assert (found["steps"], found["start_s"], len(found["by_step"])) == (3, 7.0, 5)


def test_calls_share_their_result_and_failures_stand_in_it(tmp_path: Path) -> None:
    medians = {
        "throughput/tokens_per_s": 1234.0,
        "throughput/train_tokens_per_s_device": 2345.0,
        "throughput/train_mfu_fraction": 0.41,
        "throughput/critic_mfu_fraction": 0.39,
        "time/step_s": 2.0,
    }
    good = {
        "medians": medians,
        "phases_s": {"train": 1.5, "data": 0.001},
        "device_peak_bytes": {"0": 4e9},
        "start_s": 9,
    }
    loops.keep("ppo", good, tmp_path / "loops.json")
    loops.keep("sft", {"failed": "RuntimeError: no\nmore"}, tmp_path / "loops.json")
    assert list(json.loads((tmp_path / "loops.json").read_text())["cases"]) == ["sft", "ppo"]
    *_, failed, passed = (tmp_path / "loops.md").read_text().splitlines()
    assert failed.startswith("| sft | failed: RuntimeError: no |")
    assert passed == "| ppo | 1,234 | 2,345 | 41.0%, 39.0% (critic) | 2.00 | train 1.50 | 4.0 | 9 |"
