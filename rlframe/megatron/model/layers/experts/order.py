"""The order in which tokens are sent and computed: rows of the first choice first, and each choice's by token."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def places(chosen: Bool[Tensor, "T E"]) -> Int[Tensor, "T E"]:
    """Returns [T, E] the row of each token for each of its choices, -1 where it has not chosen."""
    counted = chosen.T.reshape(-1).cumsum(0, dtype=torch.int32).view(chosen.shape[::-1])
    return torch.where(chosen, counted.T - 1, -1).contiguous()


def spread(
    rows: Float[Tensor, "T F"], weights: Float[Tensor, "T E"] | None, places: Int[Tensor, "T E"], room: int
) -> tuple[Float[Tensor, "N F"], Float[Tensor, " N"] | None]:
    """Returns each row once for each of its places, and the weight of the choice that the place is for.

    Args:
        rows: [T, F].
        weights: [T, E] of each choice.
        places: [T, E] from `places`.
        room: rows that there may be, at least as many as places.
    """
    del room
    found = choices_of(places)
    return rows.index_select(0, found // places.shape[1]), None if weights is None else weights.reshape(-1)[found]


def gathered(rows: Float[Tensor, "N F"], places: Int[Tensor, "T E"]) -> Float[Tensor, "T F"]:
    """Returns the sum of the rows at each token's places."""
    count, choices = places.shape
    return rows.new_zeros(count, rows.shape[1]).index_add(0, choices_of(places) // choices, rows)


def choices_of(places: Int[Tensor, "T E"]) -> Int[Tensor, " N"]:
    """Returns [N] what each row is the place of: the token times E, plus the choice."""
    flat = places.view(-1)
    (chosen,) = torch.where(flat >= 0)
    return torch.empty_like(chosen).index_copy(0, flat[chosen].long(), chosen)
