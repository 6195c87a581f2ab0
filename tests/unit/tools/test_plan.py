"""The tool that plans a run: what it prints, what it writes, and its exit status."""

import json
from pathlib import Path

import pytest

from rlframe.tools import plan
from tests.unit.run.preflight.models import CUDA, MOE, QWEN3_4B, folder
from tests.unit.tools.test_plan_sync import SMALL

DEVICE = ["--config-name", "grpo_qwen3_moe", "--device", "h200"]


def test_a_run_that_fits_is_printed_with_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*CUDA, f"model.path={folder(tmp_path / 'm', QWEN3_4B)}", "train.parallel=d1", "rollout.num_engines=1"]
    more = ["train.recompute=full", "train.offload_optimizer=true"]
    assert plan.main([*DEVICE, *overrides, *more, "--response-tokens", "1000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert labels == ["run", "legality", "batch", "memory", "fits", "seconds", "sync", "layouts"]
    text = " ".join(" ".join(lines).split())
    assert "4.02 billion parameters, 36 layers; 1 x h200 of 150.1 GB" in text
    assert "64 prompts x 8 = 512 sequences of 1,024 + 1,000 tokens, 1,036,288 tokens a step" in text
    assert "policy: gradients - 16.1 -" in text and "legality no fault" in text
    assert "python -m rlframe.tools.plan_sync --model" in text


def test_what_does_not_fit_ends_with_status_1_and_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    overrides = [*CUDA, f"model.path={folder(tmp_path / 'm', MOE)}", "train.parallel=d8e8", "rollout.num_engines=8"]
    assert plan.main([*DEVICE, *overrides, "--json", str(file)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "fits no. generation takes most" in text and "change " in text and "1. train.parallel=" in text
    facts = json.loads(file.read_text())
    assert not facts["fits"] and facts["missing_bytes"] > 0 and len(facts["layouts"]) == 3
    (device,) = facts["devices"]
    assert device["roles"] == ["policy", "engines"] and device["count"] == 8
    assert plan.main([*DEVICE, *overrides, "--json", str(tmp_path / "no/plan.json")]) == 1
    said = capsys.readouterr().err
    assert "no/plan.json cannot be written: No such file or directory" in said and "with output=" not in said


def test_faults_are_listed_all_at_once_and_a_layout_that_cannot_be_counted_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*CUDA, f"model.path={folder(tmp_path / 'm', MOE)}", "train.parallel=d1t3"]
    assert plan.main([*DEVICE, *overrides]) == 1
    assert "tp 3 must divide num_attention_heads 32" in capsys.readouterr().err
    assert plan.main([*DEVICE, *CUDA, "mode=generate"]) == 1
    assert "mode must be train or self_test" in capsys.readouterr().err
    faulty = [*CUDA, f"model.path={folder(tmp_path / 'm', QWEN3_4B)}", "train.moe.aux_loss_coefficient=0.1"]
    assert plan.main([*DEVICE, *faulty, "data.max_prompt_tokens=50000"]) == 1
    out = capsys.readouterr().out
    assert "train.moe.aux_loss_coefficient has no effect" in out and "data.max_prompt_tokens=50000" in out


@pytest.mark.parametrize("option", ["--devices", "--devices-per-host", "--prompt-tokens", "--response-tokens"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_number_below_one_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main([*DEVICE, option, value])
    assert ended.value.code == 2
    assert f"argument {option}: must be a whole number from 1 on, got {value}" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_machine_without_a_device_plans_its_own_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--config-name", "grpo_qwen3_moe"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not predicted: the speeds of cpu are not known" in text
    assert text.endswith("layouts not compared: the speeds of cpu are not known")


def test_links_shows_the_bytes_of_the_sync_by_kind_of_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"model.path={folder(tmp_path / 'm', SMALL)}", "train.parallel=d2", "rollout=transformers"]
    short = ["data.max_prompt_tokens=32", "rollout.max_tokens=32"]
    plan.main([*DEVICE, *overrides, *short, "rollout.num_engines=1", "--links"])
    text = " ".join(capsys.readouterr().out.split())
    # One engine on the first rank's device, in float32.
    assert "links 1.79 kB within the device, on 1 link; at most 1.79 kB from or to one rank" in text
    assert "all links at once" in text
