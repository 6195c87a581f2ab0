"""What a configuration that a program has changed has beyond its recipe."""

from pathlib import Path

import yaml

from rlframe.run.differences import differences
from rlframe.run.folder import OVERRIDES, claim
from rlframe.run.load import load


def test_what_a_program_changes_is_told_as_the_command_line_would_write_it() -> None:
    run = load("grpo_qwen3_moe", ["steps=3"])
    run.train.optimizer.lr = 3e-4
    run.logging.tags = ["mine"]
    assert differences(run) == ["steps=3", "train.optimizer.lr=0.0003", 'logging.tags=["mine"]']


def test_a_part_that_the_recipe_alone_has_is_told() -> None:
    run = load("grpo_qwen3_moe")
    removed = run.reward.parts.popitem()[0]
    assert f"~reward.parts.{removed}.name" in differences(run)


def test_without_a_recipe_of_its_name_the_defaults_are_compared() -> None:
    run = load("grpo_qwen3_moe", ["name=mine", "steps=3"])
    found = differences(run)
    assert {"name=mine", "steps=3", "prompts_per_step=64"} <= set(found)
    assert not any(each.startswith("seed=") for each in found)


def test_a_run_without_a_command_leaves_them_in_its_folder(tmp_path: Path) -> None:
    run = load("grpo_qwen3_moe")
    run.output, run.logging.wandb_project = str(tmp_path), "mine"
    claim(run).close()
    written = yaml.safe_load((tmp_path / OVERRIDES).read_text())
    assert written == [f"output={tmp_path}", "logging.wandb_project=mine"]
