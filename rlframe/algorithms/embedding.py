"""Embeddings: a text's last hidden state, trained to tell the texts that belong to a query from all others of the step.

The negatives of a query are the texts of the whole optimizer step, whatever ranks and micro-batches they lie on, by
gradient caching (Gao et al. 2021, arXiv 2101.06983): first all states without gradients; from them, on the driver, the
loss L and g = dL / d state; then, micro-batch by micro-batch, the gradient of <g, state>, which by the chain rule is
that of L. No split can change it, and no rank holds more than its own texts' activations.

ms-swift's InfoNCE has a temperature of 0.1, takes dot products (its models scale their states to length 1), negatives
of the own sample alone on request (INFONCE_USE_BATCH=False), and can also set queries against queries and positives
against documents (INFONCE_INCLUDE_QQ, INFONCE_INCLUDE_DD) or draw a fixed number of hard negatives; these, and its
losses of two texts with a label (cosine similarity, contrastive, online contrastive), are not offered. It lets texts
that read alike be each other's negatives.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.ops.comparisons.contrast import info_nce, queries_and_candidates, similarities
from rlframe.ops.sequences import last_outputs, sequence_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, Output, StateOutput, Sum
from rlframe.types.supervised import Contrasted, Role
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault


@dataclass(kw_only=True, slots=True)
class EmbeddingConfig:
    """An embedding model's settings."""

    name: str = "embedding"
    """Name of the algorithm."""
    temperature: Annotated[float, Range(above=0, maximum=1e4)] = 0.05
    """Divisor of the similarities before the softmax."""
    cosine: bool = True
    """Whether similarities are cosines. Otherwise they are dot products."""
    fake_negative_margin: Annotated[float, Range(0, 1e4)] | None = None
    """Margin beyond which a text that is nearer to the query than its positive does not count as a negative, because it
    may be an unlabelled answer. In units of the similarity, before the temperature; ms-swift's INFONCE_FAKE_NEG_MARGIN,
    0.1 there. null uses all texts."""
    matryoshka_dimensions: Annotated[list[int], Range(1, 10**6)] = field(default_factory=list)
    """Numbers of leading dimensions that must also work on their own, each with a loss that is added to that of all H
    dimensions."""

    def __post_init__(self) -> None:
        check_bounds(self)
        dimensions = self.matryoshka_dimensions
        if len(set(dimensions)) < len(dimensions):
            raise SettingError("matryoshka_dimensions", "must be different numbers", got=dimensions)


class Embedding(OfflineAlgorithm):
    """InfoNCE with the whole step's texts as negatives."""

    data = "contrasted"
    output = Output.STATES
    smallest_step = 2

    def __init__(self, config: EmbeddingConfig):
        self.config = config

    def faults(self, *, hidden_size: int) -> list[Fault]:
        """Returns a fault for every dimension that the model does not have."""
        widths = [width for width in self.config.matryoshka_dimensions if width >= hidden_size]
        return [
            Fault(
                "algorithm.matryoshka_dimensions",
                f"must be below the model's {hidden_size}, which always count",
                got=width,
                hint="remove it",
            )
            for width in widths
        ]

    def token_weights(self, batch: Contrasted) -> Float[Tensor, " T"]:
        """Returns [T] 1 / queries of the step."""
        queries = int((batch.role == Role.QUERY).sum())
        return batch.loss_mask.float() / max(queries, 1)

    def prepare(self, batch: Contrasted, model: ForwardModel) -> Contrasted:
        """Returns the batch with the loss of each query, its derivative with respect to each text's state, and the
        positive's rank."""
        config = self.config
        states = model.states(batch).detach().requires_grad_()
        counted = sequence_weights(batch.loss_mask.float(), batch) > 0
        queries, candidates, chosen_from = queries_and_candidates(batch, counted)
        losses = info_nce(
            states,
            queries,
            candidates,
            chosen_from,
            temperature=config.temperature,
            cosine=config.cosine,
            margin=config.fake_negative_margin,
            dimensions=[*config.matryoshka_dimensions, states.shape[1]],
        )
        losses.sum().backward()
        with torch.no_grad():
            near = similarities(states[queries], states[candidates], cosine=config.cosine)
            ranks = 1 + ((near > near.diagonal()[:, None]) & chosen_from).sum(1)
        count = batch.num_sequences
        return replace(
            batch,
            state_gradient=states.grad,
            query_loss=torch.zeros(count).index_put((queries,), losses.detach()),
            positive_rank=torch.zeros(count, dtype=torch.int64).index_put((queries,), ranks),
        )

    def loss(self, policy: StateOutput, batch: Contrasted, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over queries of weight * loss, with the gradient of the sum over texts of weight * <g,
        state>."""
        assert batch.state_gradient is not None and batch.query_loss is not None and batch.positive_rank is not None
        weight = sequence_weights(weights, batch)
        product = (batch.state_gradient * last_outputs(policy.states, batch)).sum(1)
        # The value is that of InfoNCE. The value of the product is meaningless; for cosines it is zero.
        loss = (weight * (batch.query_loss + product - product.detach())).sum()
        ranks, ranked = batch.positive_rank, batch.positive_rank > 0
        return LossOutput(
            loss=loss,
            metrics={
                "train/loss": Sum(loss.detach()),
                "train/accuracy": masked_mean((ranks == 1).float(), ranked),
                "train/reciprocal_rank": masked_mean(1 / ranks, ranked),
            },
        )


COMPONENT, CONFIG = Embedding, EmbeddingConfig
