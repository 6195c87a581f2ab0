"""Rollouts token by token: as many of a run's samples as fit into its page."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlframe.loops.reporting.samples import read_samples, sample_files

MOST_BYTES = 2_000_000
"""Greatest size of all attempts of a run in the page, compressed, before base64 adds a third."""
MOST_FILES = 200
"""Greatest number of files of samples that are read."""
MOST_OF_ONE = 64
"""Greatest number of attempts of one file."""


def attempts(output: Path, *, most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
    """Returns the kept attempts of steps that are spread evenly over the run, by step. The last and the first step come
    first; then those halfway between, as long as there is room."""
    files = sample_files(output)
    found: dict[int, list[dict[str, Any]]] = {}
    left = most_bytes
    for place in spread(len(files))[:MOST_FILES]:
        records: list[dict[str, Any]] = []
        for record in read_samples(files[place][2]):
            # Files compress one by one, a little less than all together.
            left -= len(zlib.compress(json.dumps(record).encode(), 1))
            if left < 0 or len(records) == MOST_OF_ONE:
                break
            records.append(record)
        found[place] = records
        if left < 0:
            break
    return [record for place in sorted(found) for record in found[place]]


def spread(count: int) -> list[int]:
    """Returns the numbers 0..count-1, each of which halves a gap between those before it: the last, the first, the one
    in the middle, and so on."""
    order = [count - 1, 0] if count > 1 else list(range(count))
    known = set(order)
    for place in _middles(0, count - 1):
        if place not in known:
            known.add(place)
            order.append(place)
    return order


def _middles(low: int, high: int) -> Iterator[int]:
    gaps = [(low, high)]
    while gaps:
        following: list[tuple[int, int]] = []
        for start, end in gaps:
            if end - start > 1:
                middle = (start + end) // 2
                yield middle
                following += [(start, middle), (middle, end)]
        gaps = following
