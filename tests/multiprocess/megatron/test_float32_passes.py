"""Passes in float32 over parameters of bfloat16, which rollout.logprobs=exact makes, have the gradients of float32."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.test_layouts import Weighted, sequences, weights_of
from tests.tiny_models import make

CASES = {"bfloat16": ("bfloat16", False), "exact": ("bfloat16", True), "float32": ("float32", False)}
"""Number format of the parameters, and whether passes are in float32 whatever it is."""


def norms(rank: int, init_method: str, folder: str) -> dict[str, float]:
    """The norm of the gradient with parameters and passes in several number formats."""
    from rlframe.megatron.worker import parallel
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup

    found = {}
    for name, (dtype, float32) in CASES.items():
        setup = TrainerSetup(
            init_method=f"{init_method}-{name}", device=torch.device("cpu"), model=ModelConfig(path=folder),
            train=TrainConfig(dtype=Dtype(dtype)), seed=0, total_optimizer_steps=1, timeout_s=60,
            with_reference=False, float32=float32,
        )  # fmt: skip
        batch = sequences()
        ((share,), _) = split(batch, weights_of(batch), num_ranks=1, max_tokens=1000)
        (update,) = Trainer(setup).train([share.microbatches()], Weighted(), first_step=0)
        found[name] = float(update.metrics["train/grad_norm"].value)
        parallel.shutdown()
    return found


def test_gradients_of_exact_passes_are_those_of_float32(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    rounded = {name: value.bfloat16().float() for name, value in load_file(file).items()}
    save_file(rounded, file, metadata={"format": "pt"})
    (found,) = run_distributed(norms, 1, str(tmp_path))
    # Each element of the gradient is rounded to 8 bits when it reaches its parameter: 0.002 of it at most, at random.
    assert abs(found["exact"] / found["float32"] - 1) < 5e-4
    assert abs(found["bfloat16"] / found["float32"] - 1) > 2e-3
