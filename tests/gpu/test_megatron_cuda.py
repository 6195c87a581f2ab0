"""The training side on one GPU: Transformer Engine's layers, bfloat16, against transformers on the same device."""

import pathlib
import subprocess
import sys

import pytest
import torch

from rlframe.cluster.config import Device
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.test_layouts import LENGTHS, sequences
from tests.tiny_models import MODELS, make

pytestmark = pytest.mark.gpu


def on_gpu(rank: int, init_method: str, folder: str) -> tuple[list, list, dict]:
    """Logprobs, their plan and the exported weights of one rank on CUDA in bfloat16."""
    from rlframe.megatron.cpu import platform

    device = platform.resolve(Device.CUDA)
    platform.install(device)
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup

    setup = TrainerSetup(
        rank=rank, init_method=init_method, device=device, model=ModelConfig(path=folder),
        train=TrainConfig(parallel="d1", dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3)),
        seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=120, with_reference=False,
    )  # fmt: skip
    trainer = Trainer(setup)
    batch = sequences()
    ranks, plan = split(batch, torch.zeros(batch.num_tokens), num_ranks=1, max_tokens=40)
    pieces = trainer.export(list(trainer.layout.tensors), torch.bfloat16)
    return (
        trainer.logprobs(ranks[0].microbatches(), reference=False),
        plan,
        {name: part[0][1] for name, part in pieces.items()},
    )


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_transformers_within_bfloat16(name: str, tmp_path: pathlib.Path) -> None:
    model = make(name, tmp_path).to("cuda", torch.bfloat16)
    batch = sequences()
    expected = []
    with torch.no_grad():
        for row in batch.token_ids.split(LENGTHS):
            table = torch.log_softmax(model(row[None].cuda()).logits[0].float(), -1).cpu()
            expected.append(torch.cat([torch.zeros(1), table[:-1].gather(1, row[1:, None])[:, 0]]))
    ((logprobs, plan, _),) = run_distributed(on_gpu, 1, str(tmp_path))
    gap = (join([logprobs], plan, batch.lengths) - torch.cat(expected)).abs()
    # bfloat16 has 8 bits: logits of size 5 are off by 0.02 a layer; a wrong weight or mask is off by 1 and more. A
    # router that flips on a near tie moves single tokens further, hence the mean and not the maximum for experts.
    assert gap.mean() < 0.08, f"{name}: mean {gap.mean():.4f}, max {gap.max():.4f}"
    assert name == "qwen3_moe" or gap.max() < 0.5, f"{name}: mean {gap.mean():.4f}, max {gap.max():.4f}"


def test_supervised_training_runs_on_cuda_and_its_loss_falls(tmp_path: pathlib.Path) -> None:
    command = [
        sys.executable, "-m", "rlframe.main", "--config-name", "sft_qwen3_moe_tiny", "cluster.device=cuda",
        "train.parallel=d1", "train.dtype=bfloat16", "steps=40", f"output={tmp_path}", "logging.progress=false",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "The loss went from 5." in done.stdout + done.stderr
