"""Copies of weights, moments, main weights and step counts that drift apart are named when a checkpoint is written; and
training leaves padding at zero."""

import pathlib
from typing import Any

import torch

from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.utils.errors import WeightsDrifted
from rlframe.weight_sync.layout.memory import dirty_padding
from tests.multiprocess.checkpoint.test_training_state import train
from tests.multiprocess.distributed import run_distributed
from tests.tiny_models import make

CASES = {
    # The layout, and what is held twice in it: a weight, and a weight whose moments are.
    "d2": ("qwen3_moe", "decoder.final_layernorm.weight", None),
    "d1t2": ("qwen3", "decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    "d2e2": ("qwen3_moe", "decoder.layers.0.self_attention.linear_proj.weight", None),
    "d1p2": ("qwen3_tied", "output_layer.weight", "output_layer.weight"),
}


def on_rank(rank: int, init_method: str, folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """What each fault of each layout came to."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    return {layout: faults(rank, f"{init_method}-{layout}", folder, layout, *case) for layout, case in CASES.items()}


def faults(
    rank: int, init_method: str, folder: pathlib.Path, layout: str, model: str, weight: str, moments: str | None
) -> dict[str, str]:
    """What a checkpoint says after training, and after each fault on rank 1."""
    from rlframe.megatron.checkpoint.state import parts  # noqa: PLC0415
    from rlframe.megatron.model.model import named_parameters  # noqa: PLC0415
    from rlframe.megatron.worker import parallel  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    trainer = Trainer(TrainerSetup(
        rank=rank, init_method=init_method, device=torch.device("cpu"), model=ModelConfig(path=str(folder / model)),
        train=TrainConfig(parallel=layout, optimizer=OptimizerConfig(lr=1e-2)), seed=0, temperature=1.0,
        total_optimizer_steps=5, timeout_s=60, with_reference=False,
    ))  # fmt: skip
    train(trainer, layout, range(2))
    said = {"padding": str(dirty_padding(trainer.layout, trainer.weights)), "none": staged(trainer, folder / layout)}
    mine = named_parameters(trainer.model.chunks)

    def during(name: str, value: torch.Tensor) -> None:
        """A checkpoint while one bit of rank 1's copy is another."""
        word = value.detach().view(-1).view(torch.int32)
        word[1] ^= rank
        said[name] = staged(trainer, folder / layout)
        word[1] ^= rank

    held = {name: value for name, value in mine.items() if name == weight}
    during("weight", held.get(weight, torch.zeros(4)))
    optimizers = parts(trainer.optimizer)
    for part in optimizers:
        states = {name: part for name, value in mine.items() if name == moments and value in part.model_param_gbuf_map}
        if states:
            tensors = part._get_main_param_and_optimizer_states(mine[moments])
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                during(kind, tensors[kind])
            break
    else:
        if moments:
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                during(kind, torch.zeros(4))
    if rank:
        next(iter(optimizers[0].optimizer.state.values()))["step"] += 1
    said["steps"] = staged(trainer, folder / layout)
    parallel.shutdown()
    return said


def staged(trainer: Any, folder: pathlib.Path) -> str:
    """What staging a checkpoint says; nothing if it does."""
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    try:
        trainer.stage(folder, copy=False)
    except WeightsDrifted as error:
        return str(error)
    return ""


def test_copies_of_the_training_state_that_drift_apart_are_named(tmp_path: pathlib.Path) -> None:
    for model in {model for model, *_ in CASES.values()}:
        make(model, tmp_path / model)
    ranks = run_distributed(on_rank, 2, tmp_path)
    assert ranks[0] == ranks[1]
    for layout, (_, weight, moments) in CASES.items():
        said = ranks[0][layout]
        assert said.pop("padding") == "None" and said.pop("none") == ""
        assert set(said) == {"weight", "steps"} | ({"param", "exp_avg", "exp_avg_sq"} if moments else set())
        drifted = "the training state has drifted apart: "
        assert all(text.startswith(drifted) and "by ranks 0 and by ranks 1" in text for text in said.values()), said
        assert "Adam's step count" in said["steps"]
        name = "word_embeddings" if weight == "output_layer.weight" else weight.rpartition(".layers.0.")[2]
        for kind, text in said.items():
            assert kind == "steps" or name.removesuffix(".weight") in text
        for kind in ("exp_avg", "exp_avg_sq"):
            assert not moments or f"optimizer.state.{kind}." in said[kind]
