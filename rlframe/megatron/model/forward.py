"""The packed forward and backward pass: micro-batches through Megatron's pipeline schedule."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.func import functional_call

from rlframe.algorithms.base import Algorithm
from rlframe.cluster.watch.marks import mark
from rlframe.megatron.messages.microbatch import Microbatch
from rlframe.megatron.model.model import Model
from rlframe.megatron.model.mtp_loss import MtpLoss
from rlframe.megatron.model.training_fields import token_multiple
from rlframe.megatron.packed.inputs import PackedInputs
from rlframe.megatron.transfer import download, wait
from rlframe.megatron.vocab import top_k
from rlframe.megatron.vocab.chunked_head import ChunkedHead
from rlframe.megatron.vocab.divergence import divergence as whole_divergence
from rlframe.megatron.vocab.divergence import renyi_entropies
from rlframe.megatron.vocab.vocab_parallel import logprobs_and_entropy
from rlframe.ops.sequences import last_tokens
from rlframe.ops.threads import one_thread
from rlframe.types.batch import Sequences, TrainBatch
from rlframe.types.results import (
    Divergence,
    DivergenceOutput,
    Metric,
    Output,
    PassResult,
    PolicyOutput,
    StateOutput,
    ValueOutput,
)


def policy_output(
    logits: Tensor,
    batch: Sequences,
    inputs: PackedInputs,
    *,
    temperature: float,
    vocab_size: int,
    reuse_logits: bool = True,
    renyi_entropy: bool = False,
    head: ChunkedHead | None = None,
) -> PolicyOutput:
    """Returns logprob and entropy of each token of the micro-batch, from this rank's logits [1, T_padded / cp,
    V_local]; 0 of tokens that the loss does not count.

    Args:
        head: computes them from the states that the model returned in place of logits, see `ChunkedHead`.
        reuse_logits: whether backward writes the gradient over the logits, which must not be read by another loss.
        renyi_entropy: whether to compute it too.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    second_order = None
    if renyi_entropy:
        second_order = aligned(
            renyi_entropies(logits.detach().squeeze(0), temperature=temperature, vocab_size=vocab_size, group=group),
            batch,
            inputs,
        )
    following = inputs.targets(batch.token_ids)
    settings = {"temperature": temperature, "vocab_size": vocab_size, "group": group}
    if head:
        logprobs, entropy = head.logprobs_and_entropy(logits, following, **settings)
    else:
        # Not logits[0], whose backward would copy the gradient into a tensor of zeros. Nothing reads them after the
        # loss, and at 16k tokens of a 152k vocabulary they take 5 GB.
        logprobs, entropy = logprobs_and_entropy(logits.squeeze(0), following, reuse_logits=reuse_logits, **settings)
    return PolicyOutput(
        logprobs=aligned(logprobs, batch, inputs),
        entropy=aligned(entropy, batch, inputs),
        renyi_entropy=second_order,
    )


def divergence_output(
    logits: Tensor,
    batch: Sequences,
    inputs: PackedInputs,
    *,
    divergence: Divergence,
    teacher: Model | None,
    temperature: float,
    vocab_size: int,
) -> DivergenceOutput:
    """Returns `policy_output` with the divergence from the teacher, computed from the batch's teacher outputs or from
    the teacher's logits."""
    policy = policy_output(logits, batch, inputs, temperature=temperature, vocab_size=vocab_size, reuse_logits=False)
    settings = {
        "beta": divergence.beta,
        "temperature": divergence.temperature,
        "vocab_size": vocab_size,
        "group": parallel_state.get_tensor_model_parallel_group(),
    }
    if divergence.top_k:
        assert batch.teacher_top_ids is not None and batch.teacher_top_logprobs is not None
        ids, theirs = inputs.targets(batch.teacher_top_ids), inputs.targets(batch.teacher_top_logprobs)
        nats = top_k.divergence(logits.squeeze(0), ids, theirs, rest=divergence.rest, **settings)
    else:
        assert teacher is not None, "refused by config.check"
        # Computed here, without a graph; their memory ends as the gradient of the model's own logits.
        with torch.no_grad(), picked_rows(teacher, inputs):
            theirs = module_output(teacher.chunks[0], inputs)
        nats = whole_divergence(logits.squeeze(0), theirs.squeeze(0), reuse_teacher=True, **settings)
    return DivergenceOutput(logprobs=policy.logprobs, entropy=policy.entropy, divergence=aligned(nats, batch, inputs))


def aligned(values: Tensor, batch: Sequences, inputs: PackedInputs) -> Tensor:
    """Returns [T, ...] from this rank's [T_padded / cp, ...] values about each token's successor, or those of the
    tokens that are picked: moved to the token they are about.

    Values that would move from one sequence into the next land on a first token, and are zeroed, as are those of tokens
    that the loss does not count, so that nothing depends on which of these are picked. Every context-parallel rank gets
    all of them.
    """
    whole = inputs.gathered(inputs.of_all(values), parallel_state.get_context_parallel_group())
    predicted = batch.loss_mask.float().view(-1, *[1] * (whole.dim() - 1))
    # Not by an assignment, which copies the number from host memory and waits for the device to do so.
    predicted.index_fill_(0, torch.cumsum(batch.lengths, 0) - batch.lengths, 0.0)
    return torch.cat([whole.new_zeros(1, *whole.shape[1:]), whole])[: batch.num_tokens] * predicted


def token_rows(output: Tensor, inputs: PackedInputs) -> Tensor:
    """Returns [T, n] float32 values of the micro-batch's tokens, from [1, T_padded / cp / tp, n] of each rank.

    All tensor- and context-parallel ranks get all of them and compute the same from them, so the gradient for a rank is
    that of its own tokens, unchanged.
    """
    rows = output.squeeze(0).float()
    tensor = parallel_state.get_tensor_model_parallel_group()
    if tensor.size() > 1:
        # Sequence parallelism: a head that is whole on each rank has been applied to the rank's tokens only.
        rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=tensor)
    return inputs.gathered(rows, parallel_state.get_context_parallel_group())


def output_reader(
    model: Model, algorithm: Algorithm, *, temperature: float, teacher: Model | None
) -> Callable[..., Any]:
    """Returns the function that turns the last stage's output for a micro-batch, (tensor, batch, inputs), into the
    input of the loss.

    Args:
        teacher: the frozen model of `Output.DIVERGENCE`, if batches do not carry its outputs.
    """
    settings = {"temperature": temperature, "vocab_size": model.architecture.vocab_size}
    if algorithm.output is Output.TOKENS:
        return partial(policy_output, head=model.head, **settings)
    if algorithm.output is Output.TOKENS_WITH_RENYI_ENTROPY:
        return partial(policy_output, renyi_entropy=True, **settings)
    if algorithm.output is Output.DIVERGENCE:
        return partial(divergence_output, divergence=algorithm.divergence, teacher=teacher, **settings)
    if algorithm.output is Output.VALUES:
        return lambda values, batch, inputs: ValueOutput(values=token_rows(values, inputs))
    return lambda states, batch, inputs: StateOutput(states=token_rows(states, inputs))


def compute_logprobs(model: Model, microbatches: list[Microbatch], *, temperature: float) -> list[Tensor]:
    """Returns [T] nats on the CPU for each micro-batch. Empty on ranks that are not in the last pipeline stage."""
    read = partial(policy_output, temperature=temperature, vocab_size=model.architecture.vocab_size, head=model.head)
    with deferred_head(model):
        return evaluate(
            model, microbatches, lambda logits, batch, inputs: read(logits, batch, inputs).logprobs, of_loss=True
        )


def compute_entropies(model: Model, microbatches: list[Microbatch], *, temperature: float) -> list[Tensor]:
    """Returns [T] nats on the CPU for each micro-batch: the entropy of the distribution each token was drawn from.
    Empty on ranks that are not in the last pipeline stage."""
    read = partial(policy_output, temperature=temperature, vocab_size=model.architecture.vocab_size, head=model.head)
    with deferred_head(model):
        return evaluate(
            model, microbatches, lambda logits, batch, inputs: read(logits, batch, inputs).entropy, of_loss=True
        )


def compute_top(model: Model, microbatches: list[Microbatch], *, k: int, temperature: float) -> list[Tensor]:
    """Returns [T, 2 k + 1] float32 on the CPU for each micro-batch: in each token's place the ids of the k most likely
    tokens, their nats, and those of all others together; zeros at tokens that the loss does not count. Empty on ranks
    that are not in the last stage."""
    vocab_size = model.architecture.vocab_size
    assert vocab_size <= 1 << 24, "float32 holds whole numbers up to 2^24"
    split = {"vocab_size": vocab_size, "group": parallel_state.get_tensor_model_parallel_group()}

    def read(output: Tensor, batch: Sequences, inputs: PackedInputs) -> Tensor:
        logits = output.squeeze(0)
        ids = top_k.largest(logits, k=k, **split)
        nats = top_k.logprobs_and_rest(logits, ids, temperature=temperature, **split)
        return aligned(torch.cat([ids.float(), nats], dim=1), batch, inputs)

    return evaluate(model, microbatches, read, of_loss=True)


def compute_outputs(model: Model, microbatches: list[Microbatch]) -> list[Tensor]:
    """Returns float32 on the CPU for each micro-batch: [T, C] of a model with a head of C outputs, or [R, H], the
    states of `last_tokens`, of one without a head. Empty on ranks that are not in the last pipeline stage."""
    assert model.architecture.num_outputs is not None, "a language model has no such outputs"
    if model.architecture.num_outputs:
        return evaluate(model, microbatches, lambda values, batch, inputs: token_rows(values, inputs))
    return evaluate(model, microbatches, lambda states, batch, inputs: token_rows(states, inputs)[last_tokens(batch)])


def evaluate(
    model: Model,
    microbatches: list[Microbatch],
    read: Callable[[Tensor, Sequences, PackedInputs], Tensor],
    *,
    of_loss: bool = False,
) -> list[Tensor]:
    """Returns the result of `read` for each micro-batch on the last stage, on the CPU, without gradients.

    Args:
        of_loss: see `run`.
    """

    def collect(microbatch: Microbatch, inputs: PackedInputs, output: Tensor, non_loss_data: bool = True) -> Tensor:
        return download(read(output, microbatch.batch, inputs))

    set_training(model, False)
    with torch.no_grad():
        results = run(model, microbatches, collect, forward_only=True, of_loss=of_loss)
    wait(device_of(model))
    return results


def accumulate_gradients(
    model: Model,
    microbatches: list[Microbatch],
    algorithm: Algorithm,
    *,
    temperature: float,
    teacher: Model | None = None,
) -> list[PassResult]:
    """Adds the gradients of the summed loss to the gradient buffers. Returns the result of each micro-batch (last
    stage only).

    Args:
        teacher: see `output_reader`.
    """
    read = output_reader(model, algorithm, temperature=temperature, teacher=teacher)
    mtp_loss = mtp_loss_of(model, microbatches)

    def loss(microbatch: Microbatch, inputs: PackedInputs, output: Any) -> tuple[Tensor, Tensor, PassResult]:
        logits, mtp_logits = output if mtp_loss else (output, None)
        outputs = read(logits, microbatch.batch, inputs)
        result = algorithm.loss(outputs, microbatch.batch, microbatch.weights)
        total, metrics = result.loss, result.metrics
        if mtp_loss and mtp_logits is not None:
            added, found = mtp_loss(mtp_logits, microbatch.batch, inputs, vocab_size=model.architecture.vocab_size)
            total, metrics = total + added, metrics | found
        logprobs = torch.empty(0) if kept_in(microbatch.batch) is None else download(outputs.logprobs.detach())
        done = PassResult(metrics=metrics, kept_logprobs=logprobs)
        # Megatron requires a token count; `finalize_gradients` never divides by it.
        return total, torch.ones((), dtype=torch.int, device=logits.device), done

    set_training(model, True)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    with deferred_head(model, when=algorithm.output is Output.TOKENS):
        with_mtp = mtp_loss is not None
        results = run(model, microbatches, loss, forward_only=False, with_mtp=with_mtp, of_loss=True)
    if any(len(each.kept_logprobs) for each in results):
        wait(device_of(model))
    # Ranks of other stages have no results.
    return [
        replace(each, kept_logprobs=kept_logprobs(each.kept_logprobs, microbatch.batch))
        for each, microbatch in zip(results, microbatches, strict=False)
    ]


def mtp_loss_of(model: Model, microbatches: list[Microbatch]) -> MtpLoss | None:
    """Returns the loss of the head for multi-token prediction in an optimizer step, or None if it is not trained."""
    if model.mtp is None:
        return None
    return MtpLoss.of(microbatches, factor=model.mtp.loss_scaling_factor, device=device_of(model))


def kept_in(batch: Sequences) -> Bool[Tensor, " R"] | None:
    """Returns [R] the mark of the sequences whose logprobs are wanted after the pass, if there is one."""
    return batch.kept if isinstance(batch, TrainBatch) else None


def kept_logprobs(logprobs: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " T_kept"]:
    """Returns [T_kept] nats of the sequences of a micro-batch that are marked as kept. All are on the CPU."""
    kept = kept_in(batch)
    return torch.empty(0) if kept is None else logprobs[torch.repeat_interleave(kept, batch.lengths)]


def measure(
    model: Model,
    microbatches: list[Microbatch],
    algorithm: Algorithm,
    *,
    temperature: float,
    teacher: Model | None = None,
) -> list[dict[str, Metric]]:
    """Returns the metrics of the loss for each micro-batch, forward only (last stage only).

    Args:
        teacher: see `output_reader`.
    """
    read = output_reader(model, algorithm, temperature=temperature, teacher=teacher)

    def collect(microbatch: Microbatch, inputs: PackedInputs, output: Tensor, non_loss_data: bool = True) -> Any:
        result = algorithm.loss(read(output, microbatch.batch, inputs), microbatch.batch, microbatch.weights)
        return result.metrics

    set_training(model, False)
    with torch.no_grad(), deferred_head(model, when=algorithm.output is Output.TOKENS):
        return run(model, microbatches, collect, forward_only=True, of_loss=True)


def deferred_head(model: Model, *, when: bool = True) -> AbstractContextManager[None]:
    """Returns the context in which `model.head`, if there is one, computes the logits by chunks."""
    return model.head.deferred() if model.head and when else nullcontext()


def picked_rows(model: Model, inputs: PackedInputs) -> AbstractContextManager[None]:
    """Returns the context in which the output layer computes the logits of the tokens that are picked."""
    return model.picked.of(inputs.picked) if model.picked else nullcontext()


def device_of(model: Model) -> torch.device:
    """Returns the device of this rank's part of the model."""
    return next(iter(model.parameters.values())).device


def set_training(model: Model, training: bool) -> None:
    """Switches the modules to training or to evaluation."""
    for chunk in model.chunks:
        chunk.train(training)


def module_output(
    module: Any, inputs: PackedInputs, *, float32: bool = False, next_tokens: Tensor | None = None
) -> Any:
    """Returns the output of a chunk of the model. That of the last one is logits [1, T_padded / cp, V_local].

    Args:
        float32: see `Model.float32`.
        next_tokens: [1, T_padded / cp] the token after each. The last chunk then returns a pair, with the logits of the
            head for multi-token prediction.
    """
    arguments = {
        "input_ids": inputs.token_ids,
        "position_ids": None,
        "attention_mask": None,
        "packed_seq_params": inputs.packing,
    }
    if next_tokens is not None:
        arguments["labels"] = next_tokens
    if not float32:
        return module(**arguments)
    copies = {name: parameter.float() for name, parameter in module.named_parameters()}
    return functional_call(module, copies, kwargs=arguments)


def packed(model: Model, batch: Sequences, context: dist.ProcessGroup, *, of_loss: bool) -> PackedInputs:
    """Returns a micro-batch as input of the model, on the CPU.

    Args:
        of_loss: see `run`.
    """
    tp = model.config.tensor_model_parallel_size
    inputs = PackedInputs.of(
        batch,
        tp * token_multiple(model.config),
        cp_size=context.size(),
        cp_rank=context.rank(),
        dynamic=model.dynamic,
    )
    return inputs.picking(batch.loss_mask, multiple=tp) if of_loss and model.picked else inputs


def filled(model: Model, microbatches: list[Microbatch]) -> list[Microbatch]:
    """Returns the micro-batches of a schedule. An interleaved one takes them in groups of as many as there are stages,
    the last of which are empty then."""
    filling = -len(microbatches) % model.config.pipeline_model_parallel_size if len(model.chunks) > 1 else 0
    return microbatches + [microbatches[0].emptied()] * filling


def run(
    model: Model,
    microbatches: list[Microbatch],
    on_output: Callable[..., Any],
    *,
    forward_only: bool,
    with_mtp: bool = False,
    of_loss: bool = False,
) -> list:
    """Runs every micro-batch through the schedule. Returns the results of `on_output(microbatch, inputs, logits)`, last
    stage only.

    Args:
        with_mtp: whether the head for multi-token prediction runs too; see `module_output`.
        of_loss: whether logits of tokens that the loss does not count may be left out.
    """
    context = parallel_state.get_context_parallel_group()
    device, count = device_of(model), len(microbatches)
    microbatches = filled(model, microbatches)

    numbers = itertools.count(1)

    def forward_step(iterator: Any, module: Any) -> tuple[Tensor, Callable[..., Any]]:
        mark(f"forward {next(numbers)} of {len(microbatches) * len(model.chunks)} micro-batches")
        microbatch = next(iterator)
        with one_thread():
            inputs = packed(model, microbatch.batch, context, of_loss=of_loss).to(device)
            microbatch = microbatch.to(device)
        if model.dynamic and inputs.packing.local_cp_size is None:
            # The micro-batch before may have had whole sequences.
            inputs.packing.cp_group, inputs.packing.local_cp_size = context, context.size()
        with model.replay.of(microbatch.batch, inputs) if model.replay else nullcontext():
            batch = microbatch.batch
            following = inputs.ahead(batch.token_ids, batch.lengths, 1)[None] if with_mtp else None
            with picked_rows(model, inputs):
                output = module_output(module, inputs, float32=model.float32, next_tokens=following)
        return output, partial(on_output, microbatch, inputs)

    if model.replay:
        model.replay.begin()
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
