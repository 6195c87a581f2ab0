"""Rerankers: score a document under a query, in order to rank the documents of a query.

Pointwise, each document by itself: binary cross-entropy, as Nogueira and Cho 2019, arXiv 1901.04085, equation 1.
Listwise, the documents of a query against each other: the top-one cross-entropy of ListNet, Cao et al. 2007, equation
6, with relevance instead of exp(relevance); with one relevant document it is -log softmax(scores)[relevant].

Queries from which a listwise loss learns nothing stay in its denominator. ms-swift excludes those with a single
document, which is `min_documents=2` here, and has no queries without a relevant document.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.ops.comparisons.ranking import first_relevant_ranks, list_log_softmax, list_sizes
from rlframe.ops.sequences import last_outputs, sequence_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, Mean, Output, Sum, ValueOutput
from rlframe.types.supervised import Labelled
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import DataError, SettingError


class RerankerLoss(StrEnum):
    """Losses of a reranker. y is a document's label, s its score."""

    POINTWISE = "pointwise"
    """-y log sigmoid(s) - (1 - y) log sigmoid(-s), the mean over documents; y from 0 to 1."""
    LISTWISE = "listwise"
    """-sum of y / (sum of y) log softmax(s) over a query's documents, the mean over queries; y at least 0."""


@dataclass(kw_only=True, slots=True)
class RerankerConfig:
    """A reranker's settings."""

    name: str = "reranker"
    """Name of the algorithm."""
    loss: RerankerLoss = RerankerLoss.LISTWISE
    """Whether each document is judged by itself, or the documents of a query against each other."""
    temperature: Annotated[float, Range(above=0, maximum=1e4)] = 1.0
    """Divisor of the scores before the softmax of listwise."""
    min_documents: Annotated[int, Range(1, 10**6)] = 1
    """Least number of documents of a query in listwise. Queries with fewer are excluded, also from the denominator."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, unused in (("temperature", 1.0), ("min_documents", 1)):
            if self.loss is RerankerLoss.POINTWISE and (value := getattr(self, name)) != unused:
                raise SettingError(name, "has no effect with loss=pointwise", got=value, hint="remove it")


class Reranker(OfflineAlgorithm):
    """The output of a head of one output at the last token is the score of a query with a document."""

    data = "labelled"
    output = Output.VALUES

    def __init__(self, config: RerankerConfig):
        self.config = config
        self.right_label_above = 0.5 if config.loss is RerankerLoss.POINTWISE else 0.0
        """Label above which metrics take a document for a right one."""

    def warning(self, batches: Iterable[Labelled]) -> str | None:
        """Returns a warning if queries have no part in a listwise loss, because they have one document or no relevant
        one."""
        if self.config.loss is RerankerLoss.POINTWISE:
            return None
        silent = total = 0
        for batch in batches:
            _, query = torch.unique(batch.group, return_inverse=True)
            documents = torch.bincount(query)
            relevant = torch.bincount(query, weights=(batch.label > 0).float())
            silent += int(((documents < 2) | (relevant == 0)).sum())
            total += len(documents)
        if not silent:
            return None
        return (
            f"{silent} of {total} queries have a single document, or none with a label above 0: algorithm.loss="
            "listwise learns nothing from them; remove them, or use loss=pointwise"
        )

    def token_weights(self, batch: Labelled) -> Float[Tensor, " T"]:
        """Returns [T] 1 / documents of the step, or 1 / queries."""
        judged = batch.num_sequences
        if self.config.loss is RerankerLoss.LISTWISE:
            counted = sequence_weights(batch.loss_mask.float(), batch) > 0
            queries, sizes = list_sizes(batch.group, counted)
            judged = len(queries) if self.config.min_documents == 1 else int((sizes >= self.config.min_documents).sum())
        return batch.loss_mask.float() / max(judged, 1)

    def prepare(self, batch: Labelled, model: ForwardModel) -> Labelled:
        """Returns the same batch after checking that its labels fit the loss.

        Raises:
            DataError: a label is out of range.
        """
        highest = 1.0 if self.config.loss is RerankerLoss.POINTWISE else torch.inf
        strange = batch.label[(batch.label < 0) | (batch.label > highest)]
        if len(strange):
            raise DataError(
                f"a label is {float(strange[0]):g}; algorithm.loss={self.config.loss} needs labels from 0 "
                + ("to 1, or use loss=listwise" if highest == 1 else "on")
            )
        return batch

    def loss(self, policy: ValueOutput, batch: Labelled, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over documents of weight * loss, by `RerankerLoss`."""
        scores = last_outputs(policy.values, batch)[:, 0]
        weight = sequence_weights(weights, batch)
        counted = self._counted(batch, weight > 0)
        loss = (weight * self._of_document(scores, batch, counted)).sum()
        is_right = batch.label > self.right_label_above
        ranks = first_relevant_ranks(scores.detach()[counted], is_right[counted], batch.group[counted])
        metrics = {
            "train/loss": Sum(loss.detach()),
            "train/accuracy": Mean((ranks == 1).sum(), len(ranks)),
            "train/reciprocal_rank": Mean((1 / ranks).sum(), len(ranks)),
        }
        if self.config.loss is RerankerLoss.POINTWISE:
            right = (scores.detach() > 0) == is_right
            metrics["train/document_accuracy"] = masked_mean(right.float(), counted)
        return LossOutput(loss=loss, metrics=metrics)

    def _counted(self, batch: Labelled, inside: Tensor) -> Bool[Tensor, " R"]:
        """Returns [R] True for the documents `inside` but those of queries that have fewer than `min_documents`."""
        if self.config.min_documents == 1:
            return inside
        queries, sizes = list_sizes(batch.group, inside)
        return inside & ~torch.isin(batch.group, queries[sizes < self.config.min_documents])

    def _of_document(self, scores: Tensor, batch: Labelled, counted: Tensor) -> Float[Tensor, " R"]:
        """Returns [R] each document's part. 0.0 for documents that do not count, which are in no list."""
        if self.config.loss is RerankerLoss.POINTWISE:
            return binary_cross_entropy_with_logits(scores, batch.label, reduction="none")
        rows = counted.nonzero()[:, 0]
        label, group = batch.label[rows], batch.group[rows]
        _, index = torch.unique(group, return_inverse=True)
        total = torch.zeros_like(label).index_add(0, index, label)[index]
        # A query without a relevant document contributes nothing.
        share = label / total.where(total > 0, 1.0)
        return torch.zeros_like(scores).index_put(
            (rows,), -share * list_log_softmax(scores[rows] / self.config.temperature, group)
        )


COMPONENT, CONFIG = Reranker, RerankerConfig
