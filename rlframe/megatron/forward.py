"""The packed forward and backward: micro-batches through Megatron's pipeline schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.megatron.microbatch import Microbatch
from rlframe.megatron.model import Model
from rlframe.megatron.training_fields import token_multiple
from rlframe.megatron.vocab_parallel import logprobs_and_entropy
from rlframe.types.batch import Sequences
from rlframe.types.results import Metric, PolicyOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInputs:
    """A micro-batch as the model takes it: padded at the end so that sequence parallelism can cut it evenly."""

    token_ids: Tensor
    """[1, T_padded]"""
    packing: PackedSeqParams
    """Bounds of each sequence; the padding is one more sequence."""

    @classmethod
    def of(cls, batch: Sequences, multiple: int) -> "PackedInputs":
        """`batch` padded to a multiple of `multiple` tokens, at least one."""
        num_tokens = batch.num_tokens
        padding = multiple if num_tokens == 0 else -num_tokens % multiple
        token_ids = torch.nn.functional.pad(batch.token_ids, (0, padding))
        lengths = batch.lengths if not padding else torch.cat([batch.lengths, batch.lengths.new_tensor([padding])])
        bounds = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)
        longest = int(lengths.max())
        packing = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        return cls(token_ids=token_ids[None], packing=packing)


def policy_output(logits: Tensor, batch: Sequences, *, temperature: float, vocab_size: int) -> PolicyOutput:
    """Logprob and entropy of each token of the micro-batch, from logits [1, T_padded, V_local].

    The logits at one token predict the next; results are moved to the token they are about. What would cross from one
    sequence into the next lands on a first token, and is zeroed.
    """
    num_tokens = batch.num_tokens
    targets = torch.nn.functional.pad(batch.token_ids[1:], (0, logits.shape[1] - max(num_tokens - 1, 0)))
    logprobs, entropy = logprobs_and_entropy(
        # Not logits[0], whose backward would copy the gradient into a tensor of zeros.
        logits.squeeze(0),
        targets,
        temperature=temperature,
        vocab_size=vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
        # Nothing reads them after the loss, and at 16k tokens of a 152k vocabulary they are 5 GB.
        reuse_logits=True,
    )
    predicted = torch.ones(num_tokens, device=logits.device)
    predicted[torch.cumsum(batch.lengths, 0) - batch.lengths] = 0.0

    def aligned(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (1, 0))[:num_tokens] * predicted

    return PolicyOutput(logprobs=aligned(logprobs), entropy=aligned(entropy))


def compute_logprobs(model: Model, microbatches: list[Microbatch], *, temperature: float) -> list[Tensor]:
    """[T] nats on the CPU for each micro-batch; empty on ranks that are not in the last pipeline stage."""

    def collect(microbatch: Microbatch, logits: Tensor, non_loss_data: bool = True) -> Tensor:
        output = policy_output(
            logits, microbatch.batch, temperature=temperature, vocab_size=model.architecture.vocab_size
        )
        return output.logprobs.cpu()

    set_training(model, False)
    with torch.no_grad():
        return run(model, microbatches, collect, forward_only=True)


def accumulate_gradients(
    model: Model, microbatches: list[Microbatch], algorithm: Algorithm, *, temperature: float
) -> list[dict[str, Metric]]:
    """Gradients of the summed loss, into the gradient buffers; the metrics of each micro-batch (last stage only)."""

    def loss(microbatch: Microbatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Metric]]:
        policy = policy_output(
            logits, microbatch.batch, temperature=temperature, vocab_size=model.architecture.vocab_size
        )
        result = algorithm.loss(policy, microbatch.batch, microbatch.weights)
        # Megatron wants a token count; `finalize_gradients` never divides by it.
        return result.loss, torch.ones((), dtype=torch.int, device=logits.device), result.metrics

    set_training(model, True)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    return run(model, microbatches, loss, forward_only=False)


def set_training(model: Model, training: bool) -> None:
    """Turns the modules to training or to evaluation."""
    for chunk in model.chunks:
        chunk.train(training)


def run(model: Model, microbatches: list[Microbatch], on_output: Callable[..., Any], *, forward_only: bool) -> list:
    """Every micro-batch through the schedule; what `on_output(microbatch, logits)` returned, last stage only."""
    multiple = model.config.tensor_model_parallel_size * token_multiple(model.config)
    device = next(iter(model.parameters.values())).device
    count = len(microbatches)
    if len(model.chunks) > 1:
        # The interleaved schedule takes micro-batches in groups of as many as there are stages.
        filling = -count % model.config.pipeline_model_parallel_size
        microbatches = microbatches + [microbatches[0].emptied()] * filling

    def forward_step(iterator: Any, module: Any) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(iterator).to(device)
        inputs = PackedInputs.of(microbatch.batch, multiple)
        output = module(
            input_ids=inputs.token_ids, position_ids=None, attention_mask=None, packed_seq_params=inputs.packing
        )
        return output, partial(on_output, microbatch)

    iterators = [iter(microbatches) for _ in model.chunks]
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model.chunks,
        num_microbatches=len(microbatches),
        # With variable_seq_lengths the stages exchange true shapes; without pipeline stages this is not read.
        seq_length=max(microbatch.batch.num_tokens for microbatch in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results[:count]
