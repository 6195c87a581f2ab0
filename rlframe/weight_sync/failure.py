"""The message of a failed sync: the position of the first difference, and the version that each engine holds."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlframe.utils.errors import RlframeError
from rlframe.weight_sync.border import DestinationGroup, DestinationRank, SourceGroup, SourceRank
from rlframe.weight_sync.connection import Connection
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.plan.planner import refine

Digests = NDArray[np.uint64]


def explain(
    connection: Connection,
    source: SourceGroup,
    destinations: DestinationGroup,
    engine: int,
    tensor: str,
    version: int,
    *,
    rows: Mapping[int, Digests],
    known: tuple[int, Digests | None] | None,
) -> str:
    """Returns why `engine` does not hold `tensor` as published, down to the first box that differs.

    Args:
        rows: digest shares by destination rank.
        known: the version before and the digests of its tensors.
    """
    column = connection.names.index(tensor)
    shares = connection.engine_shares[engine]
    found = shares.totals(np.stack([rows[rank] for rank in shares.ranks]))[column]
    if known is not None and known[1] is not None and found == known[1][column]:
        text = f"engine {engine} still holds version {known[0]}: {tensor} of version {version} did not arrive"
    else:
        text = f"engine {engine} does not hold version {version}: {tensor} differs"
    regions = refine(tensor, connection.sources, connection.destinations)
    dtype = connection.dtypes[tensor]
    expected = _first_values(source.call(SourceRank.box_digests, tensor, regions, dtype))
    ranks = connection.ranks_of([engine])
    actual = destinations.call(DestinationRank.box_digests, tensor, regions, engines=[engine])
    holders = [rank for rank, layout in enumerate(connection.sources) if tensor in layout.boxes]
    end = f" (source ranks {', '.join(map(str, holders))})"
    if known is None:
        end += _rounded(connection, tensor, holders)
    for region in regions:
        for rank, values in zip(ranks, actual, strict=True):
            if region in values and values[region] != expected.get(region):
                return (
                    f"{text}; first at rows {region.row}..{region.row + region.rows - 1}, columns "
                    f"{region.col}..{region.col + region.cols - 1} on destination rank {rank}{end}"
                )
    return text + end


def _rounded(connection: Connection, tensor: str, holders: Sequence[int]) -> str:
    """Returns a clause about a tensor that the trainer holds with fewer digits than engines, or nothing. Both have just
    loaded it, so engines have digits of the checkpoint that the trainer has not."""
    mine, held = connection.sources[holders[0]].dtype(tensor), connection.dtypes[tensor]
    if mine.itemsize >= held.itemsize:
        return ""
    ours, theirs = (str(each).removeprefix("torch.") for each in (mine, held))
    return (
        f". The trainer holds it as {ours} and the engine as {theirs}, so the trainer alone rounds values of more "
        f"digits, of the checkpoint or of model.random_init: store the checkpoint in {ours}, or set "
        f"train.dtype={theirs}"
    )


def account(
    connection: Connection,
    source: SourceGroup,
    destinations: DestinationGroup,
    *,
    old: tuple[int, Digests],
    new: int,
    engines: Sequence[int] | None,
) -> str:
    """Returns which version each engine holds after a failed sync of version `new`, found from its own memory.

    If the trainer is gone, so that no sync will follow, engines that hold all of `old` are opened again with it.

    Args:
        old: the version before and the digests of its tensors.
        engines: engines that took part; None means all.
    """
    try:
        totals = connection.source_totals(source.call(SourceRank.digests))
    except RlframeError:
        totals = None
    texts, whole = [], []
    for engine in sorted(connection.engine_shares if engines is None else engines):
        try:
            ranks = connection.ranks_of([engine])
            rows = connection.stack(ranks, destinations.call(DestinationRank.digests, engines=[engine]))
        except RlframeError as error:
            texts.append(f"engine {engine} does not answer ({str(error).splitlines()[0]})")
            continue
        if not connection.differing(engine, rows, old[1]):
            whole.append(engine)
            texts.append(f"engine {engine} holds version {old[0]}")
        elif totals is not None and not connection.differing(engine, rows, totals):
            texts.append(f"engine {engine} holds version {new}")
        else:
            texts.append(f"engine {engine} holds neither version {old[0]} nor version {new} completely")
    if totals is None and whole:
        destinations.commit(old[0], engines=whole)
        end = (
            f"the trainer does not answer; engines that hold version {old[0]} continue with it, the "
            "others do not sample"
        )
    else:
        end = "none of them samples until a sync succeeds"
    return f"{', '.join(texts)}; {end}"


def _first_values(digests: list[dict[Region, int]]) -> Mapping[Region, int]:
    """Returns digests by region, from the first rank that holds it. Replicas have been found equal before."""
    return {region: value for of_rank in reversed(digests) for region, value in of_rank.items()}
