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
PROMPTS = {"long": (1500, 700, 130, 9), "short": (130, 9)}
"""Longer than what one kernel block holds, about as long as one, and shorter. The long ones are most of what attention
reads, so that they have a call of their own."""
RESPONSES = (40, 300, 1, 129)
LAYERS, NO_CALLS = 2, {"forward": 0, "backward": 0}


def batch(lengths: tuple[int, ...]) -> TrainBatch:
    """A group of responses of different lengths for each prompt."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, 67, (count,), generator=generator)

    prompts = [tokens(count) for count in lengths]
    rows = [(len(prompt), torch.cat([prompt, tokens(count)])) for prompt in prompts for count in RESPONSES]
    mask = torch.cat([torch.arange(len(row)) >= start for start, row in rows])
    return TrainBatch(
        token_ids=torch.cat([row for _, row in rows]),
        lengths=torch.tensor([len(row) for _, row in rows]),
        loss_mask=mask,
        rollout_logprobs=torch.full((len(mask),), -4.0) * mask,
        group=torch.arange(len(prompts)).repeat_interleave(len(RESPONSES)),
        rewards=torch.zeros(len(rows)),
        versions=torch.zeros(len(mask), dtype=torch.int32),
        advantages=torch.randn(len(mask), generator=generator) * mask,
    )


def on_gpu(rank: int, init_method: str, folder: str, recompute: Recompute) -> dict[str, Any]:
    """Logprobs [T], gradients [n] and calls of split attention for each of PROMPTS, with shared prompts and without, and
    of other micro-batches without."""
    from rlframe.megatron.cpu import platform

    device = platform.resolve(Device.CUDA)
    platform.install(device)
    from rlframe.megatron.model import forward
    from rlframe.megatron.packed.split_attention import SplitAttention
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
    algorithm, calls = Grpo(GrpoConfig(group_size=len(RESPONSES))), dict(NO_CALLS)
    for name in calls:
        counted(SplitAttention, name, calls)

    def passes(whole: TrainBatch, *, share: bool, budget: int) -> dict[str, Any]:
        calls.update(NO_CALLS)
        weights = algorithm.token_weights(whole)
        (own,), plan = split(whole, weights, num_ranks=1, max_tokens=budget, share_prompts=share)
        logprobs = join([trainer.logprobs(own.microbatches(), reference=False)], plan, whole.lengths)
        forward.accumulate_gradients(trainer.model, own.microbatches(), algorithm, temperature=1.0)
        gradient = trainer.model.chunks[0].buffers[0].grad_data.float().cpu().clone()
        return {"logprobs": logprobs, "gradient": gradient, "calls": dict(calls)}

    ways = {
        "plain": {"share": False, "budget": 4000},
        "other": {"share": False, "budget": 1900},
        "shared": {"share": True, "budget": 6000},
    }
    return {
        name: {way: passes(batch(prompts), **options) for way, options in ways.items()}
        for name, prompts in PROMPTS.items()
    }


def counted(kind: type, name: str, calls: dict[str, int]) -> None:
    """Counts the calls of a static method."""
    right = getattr(kind, name)

    def count(*arguments: Any) -> Any:
        calls[name] += 1
        return right(*arguments)

    setattr(kind, name, staticmethod(count))


@pytest.mark.parametrize("recompute", list(Recompute))
def test_gradients_and_logprobs_are_those_of_prompts_computed_apart(
    recompute: Recompute, tmp_path: pathlib.Path
) -> None:
    sizes = SIZES | {"num_hidden_layers": LAYERS, "max_position_embeddings": 2048}
    make("qwen3", tmp_path, **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    (found,) = run_distributed(on_gpu, 1, str(tmp_path), recompute, timeout_s=300)
    for name, results in found.items():
        plain, other, shared = results["plain"], results["other"], results["shared"]
        # Another split into micro-batches shows what rounding alone does; with shared prompts sums have another order.
        for what, least in (("logprobs", 1e-3), ("gradient", 5e-3)):
            rounding = float((other[what] - plain[what]).norm() / plain[what].norm())
            error = float((shared[what] - plain[what]).norm() / plain[what].norm())
            assert error < max(4 * rounding, least), f"{name}: {what} is off by {error:.1e}, rounding by {rounding:.1e}"
        assert not any(plain["calls"].values()) and not any(other["calls"].values())
        # Each layer once for its logprobs, and for the gradients once or, where it is computed again, twice.
        again = recompute is not Recompute.NONE
        expected = {"forward": (3 if again else 2) * LAYERS, "backward": LAYERS} if name == "long" else NO_CALLS
        assert shared["calls"] == expected, name


def test_two_calls_have_the_outputs_and_gradients_of_sequences_computed_apart() -> None:
    from rlframe.megatron.packed.fused_kernels import FusedKernels
    from rlframe.megatron.packed.inputs import PackedInputs
    from rlframe.megatron.packed.split_attention import SplitAttention
    from tests.unit.megatron.packed.plain_kernels import apart

    device, whole = torch.device("cuda"), batch(PROMPTS["long"])
    (own,), _ = split(whole, whole.advantages, num_ranks=1, max_tokens=6000, share_prompts=True)
    (microbatch,) = own.microbatches()
    shared: Any = PackedInputs.of(microbatch.batch, 64).to(device).packing.shared_prompts
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn(len(shared.positions), heads, 128, generator=generator, device=device) for heads in (4, 2, 2, 4)
    )
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.float64, torch.bfloat16):
        # What the kernels do not write is no number.
        trash = [torch.full_like(query, torch.nan) for _ in range(20)]
        del trash
        inputs = [each.bfloat16().to(dtype).requires_grad_() for each in (query, key, value)]
        if dtype == torch.bfloat16:
            output = SplitAttention.apply(*inputs, shared.split, FusedKernels(128**-0.5))
        else:
            output = apart(*inputs, shared)
        gradients = torch.autograd.grad(output, inputs, grad.bfloat16().to(dtype))
        found[dtype] = [output.detach().double(), *(each.double() for each in gradients)]
    for mine, right in zip(found[torch.bfloat16], found[torch.float64], strict=True):
        # bfloat16 rounds by 2^-9 of a number at most, of which outputs and gradients have two or three.
        assert float((mine - right).norm() / right.norm()) < 0.01
