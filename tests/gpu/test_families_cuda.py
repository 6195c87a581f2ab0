"""Every family on one GPU: Transformer Engine's layers in bfloat16 against transformers on the same device.

Needs one GPU; two for the gradient norm under tensor parallelism.
"""

import importlib
import inspect
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.cluster.config import Device
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.test_layouts import LENGTHS, Weighted, sequences, weights_of
from tests.tiny_models import MODELS, make

pytestmark = pytest.mark.gpu
LATENT = ("deepseek_v3", "deepseek_v3_yarn", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
WIDTHS: dict[str, dict[str, Any]] = {
    # Fused attention wants heads whose widths are multiples of 8, for latent attention of both kinds of head.
    **dict.fromkeys(LATENT, {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}),
    "gpt_oss": {"head_dim": 64},
}


@pytest.fixture(autouse=True)
def plain_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls flash-linear-attention where it is installed. What is compared with has no such kernel."""
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        plain = inspect.unwrap(module.torch_chunk_gated_delta_rule)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", plain)


def on_gpu(rank: int, init_method: str, folder: str, layout: str) -> dict[str, Any]:
    """What one rank on CUDA in bfloat16 has to show: logprobs, exported pieces, parameter shapes, gradient norm."""
    from rlframe.megatron.cpu import platform

    # Each rank sees all GPUs here.
    device = torch.device("cuda", rank) if layout != "d1" else platform.resolve(Device.CUDA)
    platform.install(device)
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup

    setup = TrainerSetup(
        rank=rank, init_method=init_method, device=device, model=ModelConfig(path=folder),
        train=TrainConfig(parallel=layout, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9)),
        seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=120, with_reference=False,
    )  # fmt: skip
    trainer = Trainer(setup)
    batch = sequences()
    (share,), plan = split(batch, weights_of(batch), num_ranks=1, max_tokens=40)
    mine = share.microbatches()
    return {
        "logprobs": trainer.logprobs(mine, reference=False),
        "plan": plan,
        "pieces": trainer.export(list(trainer.layout.tensors), torch.bfloat16),
        "shapes": {name: tuple(value.shape) for name, value in trainer.model.parameters.items()},
        "shard": trainer.model.shards[0],
        "grad_norm": trainer.train([mine], Weighted(), first_step=0)[0].metrics["train/grad_norm"].value,
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_family_equals_transformers_and_exports_its_checkpoint(name: str, tmp_path: pathlib.Path) -> None:
    model = make(name, tmp_path, **WIDTHS.get(name, {})).to("cuda", torch.bfloat16)
    batch, logprobs = sequences(), []
    for row in batch.token_ids.split(LENGTHS):
        table = torch.log_softmax(model(row[None].cuda()).logits[0].float(), -1).cpu()
        logprobs.append(torch.cat([torch.zeros(1), table[:-1].gather(1, row[1:, None])[:, 0]]))
    expected = torch.cat(logprobs)
    (-(weights_of(batch) * expected).sum()).backward()
    norm = torch.stack([p.grad.float().square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    (result,) = run_distributed(on_gpu, 1, str(tmp_path), "d1")

    # The tolerances of test_megatron_cuda: a router that flips on a near tie moves single tokens further.
    gap = (join([result["logprobs"]], result["plan"], batch.lengths) - expected.detach()).abs()
    assert gap.mean() < 0.08, f"{name}: mean {gap.mean():.4f}, max {gap.max():.4f}"
    # A router that flips changes gradients too; a parameter that is left out or counted twice changes them more.
    assert result["grad_norm"] == pytest.approx(float(norm), rel=0.15)

    family = load_family(tmp_path)
    assert family.parameters(family.architecture(read_config(tmp_path)), result["shard"]) == result["shapes"]
    for tensor, value in load_file(tmp_path / "model.safetensors").items():
        kept = value if tensor.endswith("e_score_correction_bias") else value.bfloat16()
        ours = torch.zeros_like(kept)
        matrix = ours.view(-1, kept.shape[-1])
        for (row, rows, col, cols), piece in result["pieces"][tensor]:
            matrix[row : row + rows, col : col + cols] = piece
        assert torch.equal(ours, kept), f"{name}: {tensor}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_the_gradient_norm_does_not_depend_on_tensor_parallelism(name: str, tmp_path: pathlib.Path) -> None:
    make(name, tmp_path, **WIDTHS.get(name, {}))
    (alone,) = run_distributed(on_gpu, 1, str(tmp_path), "d1")
    norms = [result["grad_norm"] for result in run_distributed(on_gpu, 2, str(tmp_path), "d1t2")]
    # Experts, sinks or latent projections counted on one rank only, or twice, are off by 20 % and more.
    assert norms == pytest.approx([alone["grad_norm"]] * 2, rel=0.05)
