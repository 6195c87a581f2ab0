"""The stranger's path of docs/your_model.md: own data, own reward, own dense model, from a first look to an evaluation.

What runs is what the page says, block by block, with the files that it shows.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.meta.checkout import ROOT
from tests.meta.docs.pages import Block, blocks, files_of
from tests.meta.docs.test_commands import own_model, write_files

PAGE = ROOT / "docs" / "your_model.md"
STEPS = [block for block in blocks(PAGE) if block.comment == "run"]
MOST_COMMANDS = 12


def run_block(block: Block, folder: Path) -> str:
    """Runs a block in a shell. Returns what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_path_has_few_commands() -> None:
    install = next(block for block in blocks(PAGE) if block.needs)
    assert sum(len(block.commands) for block in (install, *STEPS)) <= MOST_COMMANDS


@pytest.mark.thorough
def test_a_stranger_trains_resumes_exports_and_evaluates(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    own_model(tmp_path / "my_model")
    seconds = {}
    for block in STEPS:
        started = time.monotonic()
        run_block(block, tmp_path)
        seconds[block.line] = time.monotonic() - started
    records = [json.loads(line) for line in (tmp_path / "outputs/my_grpo/metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "train/loss" in record]
    assert [record["step"] for record in trained] == list(range(1, 21))
    assert all(0.0 <= record["reward/mine_mean"] <= 1.0 for record in trained)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "exported").iterdir()
    }
    assert set(files_of(PAGE)) == {"my_data.jsonl", "my_reward.py", "my_grpo.yaml"}
    sys.stdout.write(f"seconds by line of the page: {seconds}; {sum(seconds.values()):.0f} in all\n")
