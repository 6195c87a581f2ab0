"""Each engine once for all of these tests, as the contract wants to see it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlframe.rollout.base.engine import RolloutEngine
from rlframe.rollout.transformers.engine import load_weights, weights_of
from tests.contracts.engines.kinds import ENGINES, param
from tests.contracts.engines.trainer import Case, Described, Running, describe, make, synced, verify


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture-of-experts model with a tokenizer and several stop tokens."""
    return make("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", params=[param(name) for name in ENGINES])
def running(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    """The engine of a kind."""
    engine = request.param.start(folder)
    yield Running(request.param, engine, describe(engine))
    engine.close()


@pytest.fixture
def served(running: Running) -> Running:
    """The engine of a kind that has processes of its own."""
    if not running.kind.core:
        pytest.skip("the embedded engine runs in this process")
    return running


@pytest.fixture
def described(running: Running) -> Described:
    """What its ranks said before anything was connected."""
    return running.described


@pytest.fixture
def engine(running: Running, folder: Path) -> RolloutEngine:
    """A running engine with the checkpoint's weights, verified as version 3."""
    if running.has_other_weights:
        restored(running, folder)
    verify(running.engine, 3)
    return running.engine


@pytest.fixture
def case(running: Running, folder: Path) -> Case:
    """See Case."""
    weights = restored(running, folder)
    running.has_other_weights = True
    return Case(running.kind, running.engine, folder, weights, *synced(running.engine, weights))


def restored(running: Running, folder: Path) -> dict[str, Tensor]:
    """The checkpoint's weights, which the engine has now, whatever a test has left in it."""
    weights = load_file(folder / "model.safetensors")
    if running.kind.core:
        # Direct copies would only compare the first version.
        synced(running.engine, weights, transport="reload")
    else:
        with torch.no_grad():
            load_weights(weights_of(running.engine.model), weights)
    running.has_other_weights = False
    return weights
