"""A training state written before a change of the code loads after it, in any layout, value for value.

`older/` holds states as releases have written them, each with the SHA-256 of every whole tensor in it. This file, run
<as a program, writes a further one: `python -m tests.multiprocess.checkpoint.test_older NAME`.
="""

import hashlib
import json
import pathlib
import sys
import tarfile
import tempfile
from typing import Any

import pytest
import torch

from rlframe.megatron.checkpoint.metadata import read_metadata
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from tests.multiprocess.checkpoint.test_training_state import Likelihood, shares, state_of, whole
from tests.multiprocess.distributed import run_distributed, save
from tests.tiny_models import make

OLDER = pathlib.Path(__file__).parent / "older"
LAYOUT = "d2e2"
"""In which they were written."""
OTHER_LAYOUTS = ["d1t2", *(pytest.param(layout, marks=pytest.mark.thorough) for layout in (LAYOUT, "d1"))]
STEPS = 2
DIGESTS = "digests.json"
STATE = "training"


def small_model(folder: pathlib.Path) -> pathlib.Path:
    """Writes the model that the states are of."""
    sizes = {"hidden_size": 16, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 8, "num_experts": 4}
    make("qwen3_moe", folder, **sizes)
    return folder


def on_rank(rank: int, init_method: str, model: pathlib.Path, state: pathlib.Path, layout: str, writes: bool) -> Any:
    """Returns this rank's pieces of the state, trained and written or read."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    trainer = Trainer(TrainerSetup(
        rank=rank, init_method=init_method, device=torch.device("cpu"), model=ModelConfig(path=str(model)),
        train=TrainConfig(parallel=layout, dtype="float32", optimizer=OptimizerConfig(lr=1e-2)), seed=0,
        temperature=1.0, total_optimizer_steps=4, timeout_s=60, with_reference=False,
    ))  # fmt: skip
    if writes:
        mine = [shares(layout, index)[trainer.coordinates.dp_rank] for index in range(STEPS)]
        trainer.train(mine, Likelihood(), first_step=0)
        save(trainer, state)
    else:
        trainer.verify(state)
        trainer.load(state, num_optimizer_steps=STEPS)
    found = state_of(trainer)
    parallel.shutdown()
    return found


def digests(model: pathlib.Path, ranks: list[Any]) -> dict[str, str]:
    """Returns the SHA-256 of every whole tensor of the state."""
    from safetensors.torch import load_file  # noqa: PLC0415

    shapes = {name: tensor.shape for name, tensor in load_file(model / "model.safetensors").items()}
    return {
        f"{kind} {name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for kind in ranks[0]
        for name, tensor in whole([rank[kind] for rank in ranks], shapes).items()
    }


def written(folder: pathlib.Path) -> pathlib.Path:
    """Writes a state and its digests into `folder`, and returns it."""
    model, state = small_model(folder / "model"), folder / STATE
    state.mkdir()
    ranks = run_distributed(on_rank, Parallel.parse(LAYOUT).world, model, state, LAYOUT, True)
    (folder / DIGESTS).write_text(json.dumps(digests(model, ranks), indent=1))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The model's folder."""
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=sorted(OLDER.glob("*.tar.xz")), ids=lambda path: path.name.removesuffix(".tar.xz"))
def older(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of a state and its digests."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_a_state_written_before_loads_now(layout: str, older: pathlib.Path, model: pathlib.Path) -> None:
    ranks = run_distributed(on_rank, Parallel.parse(layout).world, model, older / STATE, layout, False)
    assert digests(model, ranks) == json.loads((older / DIGESTS).read_text())


def test_what_is_written_now_has_the_pieces_of_what_was_written_before(
    older: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before, now = (read_metadata(folder / STATE) for folder in (older, written(tmp_path_factory.mktemp("now"))))
    assert before.state_dict_metadata.keys() == now.state_dict_metadata.keys()
    for name, mine in now.state_dict_metadata.items():
        other = before.state_dict_metadata[name]
        assert type(mine) is type(other), name
        for field in ("size", "properties"):
            assert getattr(mine, field, None) == getattr(other, field, None), name
        pieces, others = (
            {(chunk.offsets, chunk.sizes) for chunk in getattr(each, "chunks", [])} for each in (mine, other)
        )
        assert pieces == others, name
    assert {index.fqn for index in before.storage_data} == {index.fqn for index in now.storage_data}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as aside:
        made = written(pathlib.Path(aside))
        OLDER.mkdir(exist_ok=True)
        with tarfile.open(OLDER / f"{sys.argv[1]}.tar.xz", "w:xz") as archive:
            for name in (STATE, DIGESTS):
                archive.add(made / name, arcname=name)
