"""A resumed run goes on with the first weights that it began with, where it still needs them."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlframe.loops.config import CheckpointConfig
from rlframe.loops.resuming import Resumption
from rlframe.loops.saving import first_weights
from rlframe.loops.saving.checkpoints import STATE, RunState
from rlframe.models.config import ModelConfig
from rlframe.models.hub import EMBEDDED
from rlframe.utils.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED / "qwen3_moe_tiny", tmp_path / "model"))


def train(folder: Path) -> None:
    """Moves every weight by a little, as another run that writes to the same folder."""
    file = folder / "model.safetensors"
    # Not to the file that others may have mapped.
    weights = {name: value * 1.01 for name, value in load_file(file).items()}
    file.unlink()
    save_file(weights, file)


def test_the_identity_is_that_of_the_weights(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder))
    first = first_weights.identity(model, None)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert first_weights.identity(ModelConfig(path=str(copy)), None) == first, "wherever they are"
    drawn = first_weights.identity(replace(model, random_init=True), None)
    train(folder)
    assert first_weights.identity(model, None) != first
    assert first_weights.identity(replace(model, random_init=True), None) == drawn, "its weights are not read"
    start = tmp_path / "start"
    start.mkdir()
    (start / "__0_0.distcp").write_bytes(bytes(1 << 20))
    begun = first_weights.identity(model, str(start))
    (start / "__0_0.distcp").write_bytes(bytes((1 << 20) - 1) + b"1")
    assert first_weights.identity(model, str(start)) != begun, "their end counts"


def resumed(
    folder: Path, checkpoint: Path, *, lora: bool = False, needs_reference: bool = False, critic: Path | None = None
) -> Any:
    """A loop of a run with a checkpoint, and its resumption, up to where the ranks load the checkpoint.

    Args:
        critic: folder of the model of a critic with adapters.
    """
    train = SimpleNamespace(lora=object() if lora else None)
    adapted = SimpleNamespace(model=ModelConfig(path=str(critic)), train=SimpleNamespace(lora=object()))
    policy = SimpleNamespace(
        setup=SimpleNamespace(model=ModelConfig(path=str(folder)), train=train), verify=lambda folder: None, load=stop
    )
    loop: Any = SimpleNamespace(
        algorithm=SimpleNamespace(needs_reference=needs_reference, precomputes_reference=False),
        algorithm_state=dict,
        policy=policy,
        auxiliary={"critic": SimpleNamespace(setup=adapted, verify=lambda folder: None)} if critic else {},
        results={},
        source=SimpleNamespace(state=dict, restore=lambda state: None),
        prepare=lambda: None,
    )
    checkpoints: Any = SimpleNamespace(latest=lambda: checkpoint if checkpoint.exists() else None)
    return loop, Resumption(CheckpointConfig(), loop, checkpoints, [])


class Loads(Exception):
    """The ranks would load the checkpoint."""


def stop(*_: Any, **__: Any) -> None:
    raise Loads


@pytest.mark.parametrize("needs", [{"lora": True}, {"needs_reference": True}, {}])
def test_other_first_weights_are_refused_where_they_are_needed(
    folder: Path, tmp_path: Path, needs: dict[str, Any]
) -> None:
    checkpoint = tmp_path / "step-00000001"
    loop, _ = resumed(folder, checkpoint, **needs)
    assert bool(loop.first_weights) == bool(needs)
    checkpoint.mkdir()
    saved = RunState(step=1, num_optimizer_steps=1, data={}, results={}, first_weights=loop.first_weights)
    (checkpoint / STATE).write_text(json.dumps(asdict(saved)))
    with pytest.raises(Loads):
        resumed(folder, checkpoint, **needs)[1].resume()
    train(folder)
    expected = pytest.raises(CheckpointError, match="other weights than when this run began") if needs else None
    with expected or pytest.raises(Loads):
        resumed(folder, checkpoint, **needs)[1].resume()


def test_another_base_of_the_adapters_of_a_critic_is_refused(folder: Path, tmp_path: Path) -> None:
    checkpoint, critic = tmp_path / "step-00000001", Path(shutil.copytree(folder, tmp_path / "critic"))
    loop, _ = resumed(folder, checkpoint, critic=critic)
    checkpoint.mkdir()
    begun: dict[str, Any] = {
        "first_weights": loop.first_weights,
        "auxiliary_first_weights": loop.auxiliary_first_weights,
    }
    saved = RunState(step=1, num_optimizer_steps=1, data={}, results={}, **begun)
    (checkpoint / STATE).write_text(json.dumps(asdict(saved)))
    train(folder)
    with pytest.raises(Loads):
        resumed(folder, checkpoint, critic=critic)[1].resume()
    train(critic)
    with pytest.raises(CheckpointError, match=f"the critic's model {critic} holds other weights than when this run"):
        resumed(folder, checkpoint, critic=critic)[1].resume()


def test_checkpoints_from_before_do_not_say_what_they_began_with(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    former = asdict(RunState(step=1, num_optimizer_steps=1, data={}, results={}))
    del former["first_weights"]
    (checkpoint / STATE).write_text(json.dumps(former))
    loop, resumption = resumed(folder, checkpoint, lora=True)
    with pytest.raises(Loads):
        resumption.resume()
    # But ranks that restart are compared with those of the program.
    train(folder)
    assert loop.first_weights
    with pytest.raises(CheckpointError, match="the base of its adapters is in no checkpoint"):
        resumption.resume()
