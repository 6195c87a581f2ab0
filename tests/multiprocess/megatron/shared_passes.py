"""Passes of a trainer over prompts that responses share, and over the same computed apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.cluster.config import Device
from rlframe.megatron.config.options import Recompute, RecomputeConfig
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from rlframe.types.batch import TrainBatch

LAYERS, HEAD_DIM = 2, 128
SIZES = {"num_hidden_layers": LAYERS, "head_dim": HEAD_DIM, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Changes of tiny_models' qwen3."""
NO_CALLS = {"forward": 0, "backward": 0}


@dataclass(frozen=True)
class Case:
    """Responses to each of some prompts, by numbers of tokens."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]

    def batch(self) -> TrainBatch:
        """A group of responses for each prompt."""
        generator = torch.Generator().manual_seed(0)

        def tokens(count: int) -> torch.Tensor:
            return torch.randint(0, 67, (count,), generator=generator)

        prompts = [tokens(count) for count in self.prompts]
        rows = [(len(prompt), torch.cat([prompt, tokens(count)])) for prompt in prompts for count in self.responses]
        mask = torch.cat([torch.arange(len(row)) >= start for start, row in rows])
        return TrainBatch(
            token_ids=torch.cat([row for _, row in rows]),
            lengths=torch.tensor([len(row) for _, row in rows]),
            loss_mask=mask,
            rollout_logprobs=torch.full((len(mask),), -4.0) * mask,
            group=torch.arange(len(prompts)).repeat_interleave(len(self.responses)),
            rewards=torch.zeros(len(rows)),
            versions=torch.zeros(len(mask), dtype=torch.int32),
            advantages=torch.randn(len(mask), generator=generator) * mask,
        )


WAYS = {"plain": (False, 3.0), "other": (False, 1.0), "shared": (True, 10.0)}
"""Whether prompts are shared, and the tokens of a micro-batch in units of the longest sequence."""


def on_rank(
    rank: int,
    init_method: str,
    folder: str,
    recompute: Recompute,
    device: Device,
    dtype: Dtype,
    cases: dict[str, Case],
    ways: Sequence[str] = tuple(WAYS),
) -> dict[str, Any]:
    """By case and way, logprobs [T], gradients [n] and calls of split attention. On a CPU attention is split too, by
    kernels that are written as they are defined."""
    from rlframe.megatron.cpu import platform

    where = platform.resolve(device)
    platform.install(where)
    from rlframe.megatron.model import forward
    from rlframe.megatron.packed import shared_prompts
    from rlframe.megatron.packed.split_attention import SplitAttention
    from rlframe.megatron.worker.trainer import Trainer
    from tests.unit.megatron.packed.plain_kernels import PlainKernels

    if device is Device.CPU:
        shared_prompts.FusedKernels.of = lambda core: PlainKernels(HEAD_DIM**-0.5)
    train = TrainConfig(
        dtype=dtype,
        recompute=recompute,
        recompute_options=RecomputeConfig(modules=["core_attn"] if recompute is Recompute.SELECTIVE else []),
        share_prompts=True,
    )
    trainer = Trainer(
        TrainerSetup(
            rank=rank, init_method=init_method, device=where, model=ModelConfig(path=folder), train=train, seed=0,
            temperature=1.0, total_optimizer_steps=1, timeout_s=120, with_reference=False,
        )
    )  # fmt: skip
    calls = {name: counted(SplitAttention, name) for name in NO_CALLS}

    def passes(case: Case, *, share: bool, most: float) -> dict[str, Any]:
        whole, before = case.batch(), {name: len(found) for name, found in calls.items()}
        algorithm = Grpo(GrpoConfig(group_size=len(case.responses)))
        (own,), plan = split(
            whole,
            algorithm.token_weights(whole),
            num_ranks=1,
            max_tokens=int(most * whole.lengths.max()),
            share_prompts=share,
        )
        logprobs = join([trainer.logprobs(own.microbatches(), reference=False)], plan, whole.lengths)
        forward.accumulate_gradients(trainer.model, own.microbatches(), algorithm, temperature=1.0)
        gradient = trainer.model.chunks[0].buffers[0].grad_data.float().cpu().clone()
        made = {name: len(found) - before[name] for name, found in calls.items()}
        return {"logprobs": logprobs, "gradient": gradient, "calls": made}

    return {
        name: {way: passes(case, share=WAYS[way][0], most=WAYS[way][1]) for way in ways} for name, case in cases.items()
    }


def assert_as_near_to_float32(results: dict[str, Any], exact: dict[str, Any], name: str) -> None:
    """Asserts that passes in bfloat16 over shared prompts are no farther from those in float32 than passes over prompts
    computed apart. Two calls round in other places than one: apart from one another both are as far as from float32."""
    for what in ("logprobs", "gradient"):
        apart, shared = (
            float((results[way][what] - exact["plain"][what]).norm() / exact["plain"][what].norm())
            for way in ("plain", "shared")
        )
        assert 0 < shared < 1.25 * apart, f"{name}: {what} is off by {shared:.1e}, computed apart by {apart:.1e}"


def counted(kind: type, name: str) -> list[None]:
    """Returns a list that gets longer with each call of a static method."""
    right, calls = getattr(kind, name), []

    def count(*arguments: Any) -> Any:
        calls.append(None)
        return right(*arguments)

    setattr(kind, name, staticmethod(count))
    return calls


def expected_calls(recompute: Recompute) -> dict[str, int]:
    """Split attention of one micro-batch: each layer once for its logprobs, and for its gradients once or, where it is
    computed again, twice."""
    return {"forward": (2 if recompute is Recompute.NONE else 3) * LAYERS, "backward": LAYERS}
