"""The loss of the head for multi-token prediction: the cross entropy of the token after the next."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlframe.megatron.messages.microbatch import Microbatch
from rlframe.megatron.packed.inputs import PackedInputs, ahead
from rlframe.megatron.vocab.vocab_parallel import logprobs_and_entropy
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean, Metric

STEPS = 2
"""Distance of the token that a position predicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLoss:
    """The loss of one optimizer step: factor / N * sum over predictions of -log p(token i + 2), at temperature 1.

    The N predictions are those of trained tokens, of all micro-batches and data-parallel ranks (DeepSeek-V3, arXiv
    2412.19437, equations 24 and 25, with one depth and the mean over trained tokens). A sequence's first two tokens are
    never predicted, so that no position predicts across the end of its sequence.
    """

    factor: float
    predictions: float
    """N."""

    @classmethod
    def of(cls, microbatches: list[Microbatch], *, factor: float, device: torch.device) -> "MtpLoss":
        """Returns the loss of one optimizer step. Must be called on all ranks of a data-parallel group."""
        own = sum(float(predicted(each.batch).sum()) for each in microbatches)
        total = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return cls(factor=factor, predictions=float(total))

    def __call__(
        self, logits: Tensor, batch: Sequences, inputs: PackedInputs, *, vocab_size: int
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Returns the micro-batch's part of the loss, and its metrics, from this rank's logits [1, T_padded / cp,
        V_local] of the head."""
        logprobs, _ = logprobs_and_entropy(
            logits.squeeze(0),
            inputs.ahead(batch.token_ids, batch.lengths, STEPS),
            temperature=1.0,
            vocab_size=vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            reuse_logits=True,
        )
        whole = inputs.gathered(logprobs, parallel_state.get_context_parallel_group())
        wanted = predicted(batch)
        nats = -(whole * wanted).sum()
        metrics: dict[str, Metric] = {"train/mtp_loss": Mean(nats.detach(), wanted.sum())}
        return nats * (self.factor / max(self.predictions, 1.0)), metrics


def predicted(batch: Sequences) -> Tensor:
    """Returns [T] 1.0 where the token two after this one is in the same sequence and trained on, else 0.0."""
    return ahead(batch.loss_mask.float(), batch.lengths, STEPS)
