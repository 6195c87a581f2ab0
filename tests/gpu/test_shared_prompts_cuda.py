"""Shared prompts with Transformer Engine's attention: gradients and logprobs of prompts computed apart, in bfloat16.

tests/gpu/test_gradient_matrix_cuda.py compares small ones with transformers.
"""

import pathlib
from typing import Any

import pytest
import torch

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.cluster.config import Device
from rlframe.megatron.config.options import Recompute, RecomputeConfig
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from rlframe.types.batch import TrainBatch
from tests.multiprocess.distributed import run_distributed
from tests.tiny_models import make

pytestmark = pytest.mark.gpu
SIZES = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = (700, 130, 9)
"""Longer than what one kernel block holds, about as long as one, and shorter."""
RESPONSES = (40, 300, 1, 129)


def batch() -> TrainBatch:
    """A group of responses of different lengths for each prompt."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, 67, (count,), generator=generator)

    prompts = [tokens(count) for count in PROMPTS]
    rows = [(len(prompt), torch.cat([prompt, tokens(count)])) for prompt in prompts for count in RESPONSES]
    mask = torch.cat([torch.arange(len(row)) >= start for start, row in rows])
    return TrainBatch(
        token_ids=torch.cat([row for _, row in rows]),
        lengths=torch.tensor([len(row) for _, row in rows]),
        loss_mask=mask,
        rollout_logprobs=torch.full((len(mask),), -4.0) * mask,
        group=torch.arange(len(PROMPTS)).repeat_interleave(len(RESPONSES)),
        rewards=torch.zeros(len(rows)),
        versions=torch.zeros(len(mask), dtype=torch.int32),
        advantages=torch.randn(len(mask), generator=generator) * mask,
    )


def on_gpu(rank: int, init_method: str, folder: str, recompute: Recompute) -> dict[str, Any]:
    """Logprobs [T] and gradients [n] with shared prompts and without, and of other micro-batches without."""
    from rlframe.megatron.cpu import platform

    device = platform.resolve(Device.CUDA)
    platform.install(device)
    from rlframe.megatron.model import forward
    from rlframe.megatron.worker.trainer import Trainer

    modules = ["core_attn"] if recompute is Recompute.SELECTIVE else []
    train = TrainConfig(
        dtype=Dtype.BFLOAT16,
        recompute=recompute,
        recompute_options=RecomputeConfig(modules=modules),
        share_prompts=True,
    )
    trainer = Trainer(
        TrainerSetup(
            rank=rank, init_method=init_method, device=device, model=ModelConfig(path=folder), train=train, seed=0,
            temperature=1.0, total_optimizer_steps=1, timeout_s=120, with_reference=False,
        )
    )  # fmt: skip
    algorithm, whole, found = Grpo(GrpoConfig(group_size=len(RESPONSES))), batch(), {}
    for name, share, budget in (("plain", False, 4000), ("other", False, 1200), ("shared", True, 4000)):
        weights = algorithm.token_weights(whole)
        (own,), plan = split(whole, weights, num_ranks=1, max_tokens=budget, share_prompts=share)
        logprobs = join([trainer.logprobs(own.microbatches(), reference=False)], plan, whole.lengths)
        forward.accumulate_gradients(trainer.model, own.microbatches(), algorithm, temperature=1.0)
        gradient = trainer.model.chunks[0].buffers[0].grad_data.float().cpu().clone()
        found[name] = {"logprobs": logprobs, "gradient": gradient}
    return found


@pytest.mark.parametrize("recompute", list(Recompute))
def test_gradients_and_logprobs_are_those_of_prompts_computed_apart(
    recompute: Recompute, tmp_path: pathlib.Path
) -> None:
    make("qwen3", tmp_path, max_position_embeddings=2048, **SIZES).to(torch.bfloat16).save_pretrained(tmp_path)
    (found,) = run_distributed(on_gpu, 1, str(tmp_path), recompute, timeout_s=300)
    plain, other, shared = found["plain"], found["other"], found["shared"]
    # Another split into micro-batches shows what rounding alone does; with shared prompts sums have another order too.
    for what, least in (("logprobs", 1e-3), ("gradient", 5e-3)):
        rounding = float((other[what] - plain[what]).norm() / plain[what].norm())
        error = float((shared[what] - plain[what]).norm() / plain[what].norm())
        assert error < max(4 * rounding, least), f"{what} is off by {error:.1e}, rounding alone by {rounding:.1e}"
