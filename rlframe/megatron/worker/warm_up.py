"""A pass before the first step, in which libraries choose their kernels and Triton compiles others.

On an H200 the first training of a 1.7 B takes 13.5 s and that of 12 layers of a mixture of experts 16 to 20, and 2.5
and 1.8 s after such a pass, which itself takes 13 and 19 s (docs/performance.md). The ranks of a policy otherwise wait
so long for its engines.
"""

import torch
from torch import Tensor

from rlframe.algorithms.sft import Sft, SftConfig
from rlframe.megatron.config.options import Fp8Recipe
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import Microbatch, split
from rlframe.megatron.model import forward
from rlframe.megatron.model.model import Model
from rlframe.models.families.base import Architecture
from rlframe.types.batch import Batch

SHAPES = ((2, 16, 16), (4, 48, 16))
"""Responses, tokens of the prompt and of each response of the group in each micro-batch. With shared prompts attention
to the first group is one call, and to the second, which reads more than two keys for each row, it is two."""


def leaves_no_trace(architecture: Architecture, train: TrainConfig) -> bool:
    """Returns whether a pass changes nothing that a later one reads. Scales of FP8 may follow past maxima, and kernels
    of gated delta nets are chosen once, by the sizes of their first call."""
    return architecture.gated_delta_net is None and train.fp8.recipe is not Fp8Recipe.DELAYED


def warm_up(model: Model, train: TrainConfig, *, temperature: float) -> None:
    """Runs the forward and backward pass of a few tokens. Gradients are undefined afterwards, as they are before each
    step. Counts and biases of routers are left to the caller."""
    forward.accumulate_gradients(model, microbatches(model, train), Sft(SftConfig()), temperature=temperature)
    if forward.device_of(model).type == "cuda":
        # An engine may measure the memory that is free.
        torch.cuda.empty_cache()


def microbatches(model: Model, train: TrainConfig) -> list[Microbatch]:
    """Returns a micro-batch for each of SHAPES. All data-parallel ranks have the same."""
    found = []
    for responses, prompt, response in SHAPES:
        # A budget may be smaller.
        part = min(1.0, train.sequence_tokens / (prompt + response))
        batch = group(responses, int(prompt * part), max(1, int(response * part)), model.architecture.vocab_size)
        weights: Tensor = batch.loss_mask / batch.loss_mask.sum()
        limits = {"num_ranks": 1, "max_tokens": train.sequence_tokens, "share_prompts": train.share_prompts}
        (share,), _ = split(batch, weights, **limits)
        found += share.microbatches()
    return found


def group(responses: int, prompt: int, response: int, vocab_size: int) -> Batch:
    """Returns so many different responses to one prompt, each of so many tokens."""
    length = prompt + response
    ids = torch.arange(responses * length).view(responses, length)
    ids[:, :prompt] = ids[0, :prompt].clone()
    return Batch(
        token_ids=ids.flatten() % vocab_size,
        lengths=torch.full((responses,), length),
        loss_mask=(torch.arange(length) >= max(1, prompt)).expand(responses, length).flatten(),
        rollout_logprobs=torch.zeros(responses * length),
        group=torch.zeros(responses, dtype=torch.int64),
        rewards=torch.zeros(responses),
        versions=torch.zeros(responses * length, dtype=torch.int32),
    )
