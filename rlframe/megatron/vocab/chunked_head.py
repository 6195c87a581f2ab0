"""The output layer and the logprobs after it, some tokens at a time, so that the logits of all never exist.

At 131,072 tokens the logits of a vocabulary of 151,936 take 40 GB in bfloat16. Here those of a chunk exist, twice: they
are computed again for the backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from rlframe.megatron.vocab import vocab_parallel
from rlframe.ops.float32_logits import float32_logits


class ChunkedHead:
    """Defers Megatron's output layer: while `deferred`, the model returns the states before it."""

    def __init__(self, layer: torch.nn.Module, *, chunk_tokens: int, float32: bool = False):
        """
        Args:
            float32: whether logits stay in float32, see `model.float32_logits`.
        """
        self.layer, self.chunk_tokens, self.float32 = layer, chunk_tokens, float32
        self._compute, self._active = layer.forward, False
        self._weight: Tensor | None = None
        layer.forward = self._forward

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes the model return [1, T / cp / tp, H] states instead of logits."""
        self._active = True
        try:
            yield
        finally:
            self._active, self._weight = False, None

    def _forward(self, states: Tensor, weight: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Takes the place of the layer's forward. Tied embeddings come as an argument."""
        if not self._active:
            return self._compute(states, weight=weight, **options)
        self._weight = self.layer.weight if weight is None else weight
        return states, None

    def logprobs_and_entropy(
        self, states: Tensor, targets: Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup
    ) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
        """Returns the results of `vocab_parallel.logprobs_and_entropy` for the states that the model returned.

        Args:
            states: [1, T / tp, H] of each rank, of its own tokens.
        """
        assert self._weight is not None, "the model has returned logits"
        rows = states.squeeze(0)
        if group.size() > 1:
            # Each rank has its own columns of the vocabulary: the gradients of the states are summed.
            rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=group)
        return HeadInChunks.apply(
            rows, self._weight, targets, temperature, vocab_size, group, self.chunk_tokens, self.float32
        )


class HeadInChunks(torch.autograd.Function):
    """The product with the weight and `VocabParallelLogprobs`, chunk after chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "T H"],
        weight: Float[Tensor, "V_local H"],
        targets: Int[Tensor, " T"],
        temperature: float,
        vocab_size: int,
        group: Any,
        chunk_tokens: int,
        float32: bool,
    ) -> Any:
        """Keeps the states, and two numbers of each token."""
        product = float32_logits if float32 else rounded_logits
        found = torch.empty(3, len(states), dtype=torch.float32, device=states.device)
        chunks = [slice(first, first + chunk_tokens) for first in range(0, len(states), chunk_tokens)]
        for rows in chunks:
            found[:, rows] = vocab_parallel.measured(
                product(states[rows], weight), targets[rows], temperature, vocab_size, group
            )
        logprobs, entropy, log_normalizer = found
        ctx.save_for_backward(states, weight, targets, log_normalizer, entropy)
        ctx.temperature, ctx.chunks, ctx.product = temperature, chunks, product
        ctx.start, ctx.valid = vocab_parallel.columns_of_rank(len(weight), vocab_size, group)
        ctx.set_materialize_grads(False)
        return logprobs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        """Computes the logits of each chunk again, and their gradient over them. Adds up the weight's in float32."""
        states, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizer)
        grad_states = torch.empty_like(states)
        trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        for rows in ctx.chunks:
            logits = ctx.product(states[rows], weight)
            of_entropy = None if grad_entropy is None else grad_entropy[rows]
            vocab_parallel.implementation(logits).gradient(
                logits, targets[rows], log_normalizer[rows], entropy[rows], grad_logprobs[rows], of_entropy, logits,
                ctx.temperature, ctx.start, ctx.valid,
            )  # fmt: skip
            gradient = logits.to(weight.dtype)
            grad_states[rows] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.t() @ states[rows]
        return grad_states, grad_weight.to(weight.dtype) if grad_weight is not None else None, *[None] * 6


def rounded_logits(states: Float[Tensor, "T H"], weight: Float[Tensor, "V_local H"]) -> Float[Tensor, "T V_local"]:
    """Returns the logits in the number format of states and weight."""
    return states @ weight.t()
