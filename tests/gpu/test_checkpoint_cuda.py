"""Checkpoints on one GPU: staged in pinned memory while training goes on, bit by bit, and exchanged with a CPU."""

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.cluster.config import Device
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.models.config import ModelConfig
from tests.multiprocess.checkpoint.test_convert import convert_one
from tests.multiprocess.checkpoint.test_training_state import OPTIMIZER, train
from tests.multiprocess.distributed import run_distributed
from tests.tiny_models import make

pytestmark = pytest.mark.gpu


def trainer_on_gpu(init_method: str, model: str) -> Any:
    """A bfloat16 trainer of one rank, with Transformer Engine."""
    from rlframe.megatron.cpu import platform

    device = platform.resolve(Device.CUDA)
    platform.install(device)
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup

    return Trainer(TrainerSetup(
        rank=0, init_method=init_method, device=device, model=ModelConfig(path=model),
        train=TrainConfig(parallel="d1", dtype=Dtype.BFLOAT16, optimizer=OPTIMIZER),
        seed=0, temperature=1.0, total_optimizer_steps=6, timeout_s=120, with_reference=False,
    ))  # fmt: skip


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """By Hugging Face name; the only rank's only piece of each."""
    return {
        name: torch.cat([values.flatten() for _, values in pieces])
        for name, pieces in trainer.export(list(trainer.layout.tensors), torch.float32).items()
    }


def there_and_back(rank: int, init_method: str, model: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """Weights after five steps: straight on, and from a state staged after three and written after five."""
    path = pathlib.Path(folder)
    trainer = trainer_on_gpu(init_method, model)
    train(trainer, "d1", range(3))
    trainer.stage(path, copy=True)
    staged = trainer.staged
    assert all(value.is_pinned() for _, value in staged.items if isinstance(value, torch.Tensor))
    train(trainer, "d1", range(3, 5))
    first = weights(trainer)
    trainer.complete([trainer.write()])
    trainer.verify(path)
    trainer.load(path, num_optimizer_steps=3)
    train(trainer, "d1", range(3, 5))
    return [first, weights(trainer)]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_state_staged_in_pinned_memory_goes_on_as_if_it_had_never_left(name: str, tmp_path: pathlib.Path) -> None:
    make(name, tmp_path / "model")
    (tmp_path / "state").mkdir()
    ((first, again),) = run_distributed(there_and_back, 1, str(tmp_path / "model"), str(tmp_path / "state"))
    # Transformer Engine's backward of attention adds up in no fixed order unless told to: steps of lr = 0.01.
    for key, value in first.items():
        assert (value - again[key]).abs().max() < 5e-3, key


def load_converted(rank: int, init_method: str, model: str, folder: str) -> dict[str, torch.Tensor]:
    """Weights after loading what a CPU wrote."""
    trainer = trainer_on_gpu(init_method, model)
    with torch.no_grad():
        for parameter in trainer.model.parameters.values():
            parameter.zero_()
    trainer.load_weights(pathlib.Path(folder))
    return weights(trainer)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_transformer_engine_loads_what_a_cpu_wrote(name: str, tmp_path: pathlib.Path) -> None:
    make(name, tmp_path / "model")
    run_distributed(convert_one, 1, str(tmp_path / "model"), str(tmp_path / "converted"))
    (loaded,) = run_distributed(load_converted, 1, str(tmp_path / "model"), str(tmp_path / "converted"))
    for key, value in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(loaded[key].sort().values, value.bfloat16().float().flatten().sort().values), key
