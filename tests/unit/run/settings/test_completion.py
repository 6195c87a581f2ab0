"""What a shell offers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlframe.config.load import choices, config_folders, config_names
from rlframe.run.settings.completion import Completion, words_of


def offered(line: str) -> list[str]:
    words, current = words_of(f"rlframe {line}")
    folders = config_folders(None)
    return Completion(
        words,
        folders=folders,
        names=config_names(folders),
        groups=choices(folders),
        tools=["doctor", "plan"],
        default_name="grpo_qwen3_moe",
    ).of(current)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.optimizer.sche", ["train.optimizer.schedule="]),
        ("train.opt", ["train.optimizer."]),
        ("train.optimizer.schedule=c", ["train.optimizer.schedule=constant", "train.optimizer.schedule=cosine"]),
        ("++data.shuffle=", ["++data.shuffle=false", "++data.shuffle=true"]),
        ("~rewa", ["~reward.", "~reward="]),
        ("algorithm=gs", ["algorithm=gspo"]),
        ("algorithm.name=gs", ["algorithm.name=gspo"]),
        ("algorithm.clip_h", ["algorithm.clip_high="]),
        ("algorithm=sft algorithm.clip_h", []),
        ("--config-name=sft_qwen3_moe_tiny algorithm.clip_h", []),
        ("--config-name grpo_qwen3_moe_async algorithm.clip_h", ["algorithm.clip_high="]),
        ("rollout.name=vllm rollout.gpu", ["rollout.gpu_memory_utilization="]),
        ("reward.parts.mine.w", ["reward.parts.mine.weight="]),
        ("reward.parts.mine.name=ex", ["reward.parts.mine.name=exact_match"]),
        ("environment=calculator environment.options.max_c", ["environment.options.max_calls_per_turn="]),
        ("environment.options.tools.a.name=se", ["environment.options.tools.a.name=search"]),
        ("--config-name grpo_calc", ["grpo_calculator"]),
        ("--config-name=grpo_calc", ["--config-name=grpo_calculator"]),
        ("--config-d", ["--config-dir"]),
        ("--help train.opt", ["train.optimizer"]),
        ("--help algorithm.grp", ["algorithm.grpo"]),
        ("pla", ["plan"]),
        ("seed=1 pla", []),
        ("no.such", []),
    ],
)
def test_what_is_typed_is_completed(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_the_programs_name_may_be_that_of_python() -> None:
    assert words_of("python3 -m rlframe.main seed=1 st") == (["seed=1"], "st")
    assert words_of("/usr/bin/python rlframe/main.py ") == ([], "")
    assert words_of("rlframe") == ([], "rlframe")


@pytest.mark.later
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script_that_the_program_prints(tmp_path: Path) -> None:
    program = tmp_path / "rlframe"
    program.write_text(f"#!{sys.executable}\nfrom rlframe.main import program\nprogram()\n")
    program.chmod(0o755)
    script = (
        f'PATH="{tmp_path}:$PATH"; eval "$(rlframe -sc install=bash)"; line="rlframe train.optimizer.warm"\n'
        "COMP_LINE=$line COMP_POINT=${#line} COMP_WORDS=($line) COMP_CWORD=1; hydra_bash_completion\n"
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "train.optimizer.warmup_steps=", done.stderr
