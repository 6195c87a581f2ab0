"""What a user can get wrong, through the command line: exit code 2, sentences instead of a traceback, and no Ray."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlframe.loops.config import CheckpointConfig
from rlframe.loops.saving.checkpoints import Checkpoints, RunState
from rlframe.run.folder import claim
from rlframe.run.load import load
from tests.multiprocess.door import rlframe
from tests.multiprocess.program import QUICK
from tests.rollout_models import make_with_tokenizer

SETTINGS = [f"{key}={value}" for key, value in QUICK.items()]


def refusal(folder: Path, *arguments: str) -> str:
    """What the program says when it refuses `arguments`, which it must do before Ray starts."""
    temporary = folder / "ray"
    temporary.mkdir()
    done = rlframe(folder, *arguments, environment={"RAY_TMPDIR": str(temporary)})
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(temporary.iterdir()) == [], "Ray was started"
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--config-name", "nothing"], ["the configuration has 1 fault:\n", "nothing"]),
        (["rollout=vlm"], ["rollout must name a file of configs/rollout: ", "transformers", "did you mean vllm?"]),
        (["steps"], ["steps is not a tool: there are audit, ", "key=value"]),
    ],
    ids=["config", "choice", "override"],
)
def test_what_does_not_compose_is_refused(tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    message = refusal(tmp_path, *arguments)
    assert all(part in message for part in parts), message


def test_the_folder_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    claim(load("grpo_qwen3_moe", [*SETTINGS, f"output={tmp_path / 'run'}", "train.optimizer.lr=0.001"])).close()
    message = refusal(tmp_path, *SETTINGS, f"output={tmp_path / 'run'}", "train.optimizer.lr=0.5", "seed=3")
    assert "config.yaml has train.optimizer.lr=0.001, this run has 0.5\n" in message
    assert "config.yaml has seed=0, this run has 3\n" in message
    assert "set output=ANOTHER" in message


def test_a_truncated_checkpoint_is_named_with_the_tensor_that_is_cut(tmp_path: Path) -> None:
    model = make_with_tokenizer("qwen3_moe", tmp_path / "model")
    file = model / "model.safetensors"
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    last = max((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")[1]
    file.write_bytes(content[:-100])
    settings = [setting for setting in SETTINGS if not setting.startswith("model.")]
    message = refusal(tmp_path, *settings, f"model.path={model}", "output=run")
    assert f"model.path: {file}: tensor {last} cannot be read" in message and "truncated" in message, message


def test_a_checkpoint_without_some_tensor_is_named_with_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_with_tokenizer("qwen3_moe", tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, file)
    settings = [setting for setting in SETTINGS if not setting.startswith("model.")]
    message = refusal(tmp_path, *settings, f"model.path={model}", "output=run")
    assert "lacks 1 tensors that its config.json calls for: model.layers.1.mlp.gate.weight" in message


def test_a_damaged_checkpoint_is_named_with_the_older_one_to_go_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim(load("grpo_qwen3_moe", [*SETTINGS, f"output={folder}"])).close()
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())

    def stage(part: Path) -> Callable[[], dict[str, float]]:
        (part / "weights").write_bytes(b"weights")
        return dict

    for step in (1, 2):
        last = checkpoints.save(RunState(step=step, num_optimizer_steps=step, data={}, results={}), stage)
    with (last / "training/weights").open("ab") as file:
        file.write(b"x")
    message = refusal(tmp_path, *SETTINGS, f"output={folder}")
    assert f"{last / 'training/weights'} has grown: it has 8 bytes, expected 7" in message
    assert "the run then resumes from step-00000001, which is whole" in message
    assert not list(folder.glob("LOCK-*"))


def test_an_output_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    message = refusal(tmp_path, *SETTINGS, "output=/proc/x")
    assert "output: /proc/x cannot be written: No such file or directory" in message
