"""InfoNCE: each query against all texts of the optimizer step.

Source: van den Oord et al. 2018, arXiv 1807.03748, equation 4; with the other queries' texts as negatives Henderson et
al. 2017, arXiv 1705.00652, section 4.4; over leading dimensions Kusupati et al. 2022, arXiv 2205.13147, equation 1.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from rlframe.types.supervised import Contrasted, Role


def texts_of(batch: Contrasted) -> Int[Tensor, " R"]:
    """Returns [R] an index for each text. Texts with the same tokens have the same index."""
    numbers: dict[tuple[int, ...], int] = {}
    rows = batch.token_ids.split(batch.lengths.tolist())
    return torch.tensor([numbers.setdefault(tuple(row.tolist()), len(numbers)) for row in rows])


def queries_and_candidates(
    batch: Contrasted, counted: Bool[Tensor, " R"]
) -> tuple[Int[Tensor, " N"], Int[Tensor, " D"], Bool[Tensor, "N D"]]:
    """Returns the sequence indices of the queries; those of the texts to choose from, with the positive of query i at i
    and further texts behind; and which text takes part in which query's choice.

    A text that reads like a positive of the query, or of another query that reads the same, is not one of its
    negatives.

    Args:
        counted: sequences with a token in the loss; a query counts if its positive does too.
    """
    order = torch.argsort(batch.group, stable=True)
    queries, positives = (order[batch.role[order] == role] for role in (Role.QUERY, Role.POSITIVE))
    assert torch.equal(batch.group[queries], batch.group[positives]), "a query without its positive"
    whole = counted[queries] & counted[positives]
    queries, positives = queries[whole], positives[whole]
    others = (counted & (batch.role != Role.QUERY)).index_fill(0, positives, False).nonzero()[:, 0]
    candidates = torch.cat([positives, others])
    texts = texts_of(batch)
    same_query = texts[queries][:, None] == texts[queries]
    same_text = texts[positives][:, None] == texts[candidates]
    chosen_from = same_query.float() @ same_text.float() == 0
    chosen_from.fill_diagonal_(True)
    return queries, candidates, chosen_from


def similarities(
    queries: Float[Tensor, "N H"], candidates: Float[Tensor, "D H"], *, cosine: bool
) -> Float[Tensor, "N D"]:
    """Returns [N, D] dot products. For cosines the vectors are first scaled to length 1."""
    if cosine:
        queries, candidates = normalize(queries, dim=1), normalize(candidates, dim=1)
    return queries @ candidates.T


def info_nce(
    states: Float[Tensor, "R H"],
    queries: Int[Tensor, " N"],
    candidates: Int[Tensor, " D"],
    chosen_from: Bool[Tensor, "N D"],
    *,
    temperature: float,
    cosine: bool,
    dimensions: Sequence[int],
    margin: float | None = None,
) -> Float[Tensor, " N"]:
    """Returns [N] nats: the sum over `dimensions` of -log softmax(similarities / temperature)[positive], each computed
    with that many leading dimensions only.

    Args:
        margin: texts nearer than the positive by more than this are excluded; None excludes none.
    """
    target = torch.arange(len(queries))
    losses = states.new_zeros(len(queries))
    for width in dimensions:
        leading = states[:, :width]
        near = similarities(leading[queries], leading[candidates], cosine=cosine)
        taking_part = chosen_from
        if margin is not None:
            taking_part = chosen_from & (near <= near.diagonal()[:, None] + margin)
        logits = (near / temperature).masked_fill(~taking_part, -torch.inf)
        losses = losses + cross_entropy(logits, target, reduction="none")
    return losses
