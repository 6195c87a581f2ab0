"""A pass before the first step, in which libraries choose their kernels and Triton compiles others.

On an H200 the first training of a 1.7 B takes 9.3 s, and 3.0 s after a pass of a hundred tokens (later ones 3.2), which
itself takes 7 s (docs/performance.md). The ranks of a policy otherwise wait so long for its engines.
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

GROUPS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 2, 16, 16


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
    """Returns the micro-batches of groups with equal prompts. All data-parallel ranks have the same."""
    batch = tokens(min(PROMPT_TOKENS + RESPONSE_TOKENS, train.sequence_tokens), model.architecture.vocab_size)
    weights: Tensor = batch.loss_mask / batch.loss_mask.sum()
    limits = {"num_ranks": 1, "max_tokens": train.sequence_tokens, "share_prompts": train.share_prompts}
    (share,), _ = split(batch, weights, **limits)
    return share.microbatches()


def tokens(length: int, vocab_size: int) -> Batch:
    """Returns GROUPS groups of sequences of so many tokens, which differ in the second half."""
    count = GROUPS * GROUP_SIZE
    ids = torch.arange(count * length).view(count, length)
    response = torch.arange(length) >= (length + 1) // 2
    prompt = ids[::GROUP_SIZE].repeat_interleave(GROUP_SIZE, 0)
    mask = response.expand(count, length).flatten()
    return Batch(
        token_ids=torch.where(response, ids, prompt).flatten() % vocab_size,
        lengths=torch.full((count,), length),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(count * length),
        group=torch.arange(GROUPS).repeat_interleave(GROUP_SIZE),
        rewards=torch.zeros(count),
        versions=torch.zeros(count * length, dtype=torch.int32),
    )
